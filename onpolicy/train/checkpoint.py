"""Model and optimizer as torch DCP writes them: sharded, for any number of ranks."""

from __future__ import annotations

import io
import json
import pickle
import re
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.optim import Optimizer

from onpolicy.errors import CheckpointError

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
        pickle.UnpicklingError,
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


class IndexReader(dcp.FileSystemReader):
    """DCP's reader, except that its pickled index may name nothing but DCP's own records."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        data = (Path(self.path) / ".metadata").read_bytes()
        metadata = _IndexUnpickler(io.BytesIO(data)).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    _ALLOWED: ClassVar = {
        "torch.distributed.checkpoint.metadata": re.compile(r"_?[A-Z]\w*"),
        "torch.distributed.checkpoint.filesystem": re.compile(r"_?[A-Z]\w*"),
        "torch.distributed.checkpoint.planner": re.compile(r"[A-Z]\w*"),
        "torch.serialization": re.compile(r"_get_layout"),
        "torch": re.compile(r"Size|float32|bfloat16|uint8"),
        "pathlib": re.compile(r"\w*Path"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if module in self._ALLOWED and self._ALLOWED[module].fullmatch(name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"its index names {module}.{name}, which is no part of an index"
        )


def _reason(error: BaseException) -> str:
    """The first rank's own words, without DCP's collected tracebacks."""
    failures = getattr(error, "failures", None)
    return str(next(iter(failures.values()))[0] if failures else error)
