"""Model and optimizer as torch DCP writes them: sharded, for any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from onpolicy.errors import CheckpointError
from onpolicy.train.fsdp.index_reader import IndexReader

_SHARDED = "sharded"
_NUMBERS = "numbers.json"


def save_state(
    directory: Path, model: nn.Module, optimizer: Optimizer, numbers: dict[str, Any]
) -> None:
    """Write weights, moments, random state, and `numbers`, which JSON can hold; collective."""
    create_missing_moments(optimizer)
    try:
        dcp.save(_tensors(model, optimizer), checkpoint_id=str(directory / _SHARDED))
    except CheckpointException as error:  # a BaseException
        raise CheckpointError(_reason(error)) from error
    if torch.distributed.get_rank() == 0:
        (directory / _NUMBERS).write_text(json.dumps(numbers))


def load_state(directory: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Read back, in place, what `save_state` wrote, and return its numbers; collective."""
    create_missing_moments(optimizer)
    tensors = _tensors(model, optimizer)
    try:
        reader = IndexReader(directory / _SHARDED)
        reader.read_metadata()  # what DCP cannot read it reports at great length
        dcp.load(tensors, storage_reader=reader)
        numbers = json.loads((directory / _NUMBERS).read_text())
    except (
        OSError,
        ValueError,
        RuntimeError,
        CheckpointException,
    ) as error:
        raise CheckpointError(
            f"--load: {directory} is damaged or does not fit this model ({_reason(error)}). Give the "
            "--hf-checkpoint that it was made from, or remove it to resume from an earlier one."
        ) from error
    torch.set_rng_state(tensors["random_state"])
    return numbers


def _tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Everything that is saved as tensors, under flat names."""
    tensors = {"random_state": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def create_missing_moments(optimizer: Optimizer) -> None:
    """Give AdamW the state its first step would, so that there is something to save or load into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _reason(error: BaseException) -> str:
    """The first rank's own words, without DCP's collected tracebacks."""
    failures = getattr(error, "failures", None)
    return str(next(iter(failures.values()))[0] if failures else error)
