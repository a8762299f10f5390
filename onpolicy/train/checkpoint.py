"""Checkpoints: complete or not there at all, and resumable to the same bits.

A checkpoint is a directory `step_000010` under `--save`. It is written under another name and
renamed when everything is on disk, so a kill at any moment leaves the last complete one usable.

    step_000010/
      state.json       number of rollouts done, seed, resolved configuration, versions
      schedule.json    learning-rate schedule
      sharded/         torch DCP: weights, AdamW moments, random state
      hf/              the policy as a Hugging Face checkpoint
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from onpolicy.errors import CheckpointError

SHARDED = "sharded"
SCHEDULE = "schedule.json"
STATE = "state.json"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def save_state(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """Write weights, moments and schedule; collective."""
    dcp.save(_tensors(model, optimizer), checkpoint_id=directory / SHARDED)
    if torch.distributed.get_rank() == 0:
        state = {"last_epoch": schedule.last_epoch, "last_lr": schedule.get_last_lr()}
        write_durably(directory / SCHEDULE, json.dumps(state))


def load_state(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """Read back, in place, what `save_state` wrote; collective, under any number of ranks."""
    _create_moments(optimizer)
    tensors = _tensors(model, optimizer)
    try:
        dcp.load(tensors, storage_reader=_Reader(directory / SHARDED))
    except (OSError, RuntimeError, ValueError, dcp.api.CheckpointException) as error:
        raise CheckpointError(
            f"--load: {directory} does not fit this model or is damaged ({error}). Use the "
            "--hf-checkpoint that the checkpoint was made from, or an earlier step."
        ) from error
    state = json.loads((directory / SCHEDULE).read_text())
    schedule.last_epoch = state["last_epoch"]
    for group, rate in zip(optimizer.param_groups, state["last_lr"], strict=True):
        group["lr"] = rate
    schedule._last_lr = state["last_lr"]


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that is saved as tensors, under flat names."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for key in _MOMENTS:
            if key in optimizer.state[parameter]:
                tensors[f"optimizer.{name}.{key}"] = optimizer.state[parameter][key]
    return tensors


def _create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give AdamW its state tensors, as its first step would, so that they can be loaded into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


class _Reader(dcp.FileSystemReader):
    """DCP's reader, except that its pickled index may name nothing but DCP's own records."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        data = (Path(self.path) / ".metadata").read_bytes()
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    _MODULES = (
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
        "torch.serialization",
        "torch",
        "collections",
        "pathlib",
    )
    _NAMES = re.compile(r"[A-Z]\w*|float32|bfloat16|uint8|_get_layout")

    def find_class(self, module: str, name: str) -> Any:
        if module in self._MODULES and self._NAMES.fullmatch(name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the checkpoint's index names {module}.{name}, which is no index")


def write_durably(file: Path, text: str) -> None:
    """Write a file so that it is complete on disk when this returns. Raises CheckpointError."""
    try:
        with file.open("w") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be written ({error.strerror}).") from error


def step_directory(root: Path, rollouts_done: int) -> Path:
    return root / f"step_{rollouts_done:06d}"


def begin(root: Path, rollouts_done: int) -> Path:
    """An empty directory to write the checkpoint into; what an earlier, killed attempt left goes."""
    partial = root / f".partial_step_{rollouts_done:06d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(f"--save={root}: cannot be written ({error.strerror}).") from error
    return partial


def commit(partial: Path, root: Path, rollouts_done: int) -> Path:
    """Make a completely written directory the checkpoint of its step."""
    final = step_directory(root, rollouts_done)
    for file in partial.rglob("*"):
        _sync(file)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _sync(root)
    return final


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint under `root`, or None."""
    found = sorted(p for p in root.glob("step_*") if (p / STATE).is_file())
    return found[-1] if found else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
