"""Model and optimizer as torch DCP writes them: sharded, for any number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from onpolicy.train.index_reader import IndexReader
from onpolicy.train.state import create_missing_moments


def write_tensors(directory: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Weights, moments and random state; collective."""
    dcp.save(_tensors(model, optimizer), checkpoint_id=str(directory))


def read_tensors(directory: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Read back, in place, what `write_tensors` wrote; collective."""
    tensors = _tensors(model, optimizer)
    dcp.load(tensors, storage_reader=IndexReader(directory))
    torch.set_rng_state(tensors["random_state"])


def _tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything that is saved, under flat names."""
    create_missing_moments(optimizer)
    tensors = {"random_state": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors
