"""What a training engine leaves in a checkpoint: its tensors, sharded, and a few numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from onpolicy.errors import CheckpointError
from onpolicy.system.records import checked
from onpolicy.train import distributed
from onpolicy.train.index_reader import IndexReader

_SHARDED = "sharded"
_NUMBERS = "numbers.json"
_SHAPE = TypeAdapter(dict[str, dict[str, Any]])


def save_state(directory: Path, numbers: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Have tensors written into a directory, and `numbers`, which JSON can hold; collective.

    Raises CheckpointError if the tensors cannot be written.
    """
    try:
        write(directory / _SHARDED)
    except CheckpointException as error:  # a BaseException
        raise CheckpointError(_reason(error)) from error
    if distributed.rank() == 0:
        (directory / _NUMBERS).write_text(json.dumps(numbers))


def load_state(directory: Path, read: Callable[[Path], None]) -> dict[str, Any]:
    """Have tensors read from the directory that they were written into; collective.

    Returns the numbers. Raises CheckpointError for what is damaged or of another model.
    """
    sharded = directory / _SHARDED
    try:
        IndexReader(sharded).read_metadata()  # what DCP cannot read it reports at great length
        numbers = checked(_SHAPE, json.loads((directory / _NUMBERS).read_text()))
        read(sharded)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError,
            CheckpointException) as error:  # fmt: skip
        raise CheckpointError(
            f"--load: {directory} is damaged or does not fit this model ({_reason(error)}). Give the "
            "--hf-checkpoint that it was made from, or remove it to resume from an earlier one."
        ) from error
    return numbers


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
