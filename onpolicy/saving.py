"""Checkpoints of a run: complete or not there at all, and resumable to the same bits.

A checkpoint is a directory `step_000010` under --save, named after the rollouts done. It is written
under another name and renamed when everything is on disk, so a kill at any moment leaves the last
complete one usable.

    step_000010/
      state.json    rollouts done (the position in the data), run hash, the governor's state,
                    configuration, versions
      sharded/      torch DCP: weights, AdamW moments, random state; numbers.json beside it
      hf/           the policy as a Hugging Face checkpoint
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from onpolicy.config import TrainConfig
from onpolicy.engines import EnginePair
from onpolicy.errors import CheckpointError, ConfigError
from onpolicy.models.export import export_checkpoint
from onpolicy.outputs.directory import versions
from onpolicy.train import distributed

logger = logging.getLogger(__name__)

STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands, besides its trainer."""

    rollouts_done: int
    run_hash: str

    governor: dict[str, Any]
    """Of `Ladder.state_dict`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A complete checkpoint."""

    directory: Path
    state: RunState


def find(config: TrainConfig) -> SavedRun | None:
    """The checkpoint to resume from: the latest under --load, None if there is none.

    Raises ConfigError if the run would continue with another seed, or would replace the
    checkpoints of another run.
    """
    output = config.output
    found = latest(Path(output.load)) if output.load else None
    if found is None:
        if output.save and (other := latest(Path(output.save))):
            raise ConfigError(
                f"--save={output.save}: holds checkpoints of another run (up to {other.name}), which "
                f"this one would replace. Resume it with --load {output.save}, or choose another "
                "directory."
            )
        return None
    state = json.loads((found / STATE).read_text())
    if state["config"]["seed"] != config.seed:
        raise ConfigError(
            f"--seed={config.seed}: {found} was made with --seed={state['config']['seed']}, and a "
            "resumed run continues its samples. Give the same seed."
        )
    names = [field.name for field in fields(RunState)]
    return SavedRun(directory=found, state=RunState(**{name: state[name] for name in names}))


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint under `root`."""
    return max(root.glob("step_*"), default=None)


def save(config: TrainConfig, engines: EnginePair, state: RunState) -> None:
    """Write a checkpoint; collective. Raises CheckpointError, leaving earlier ones as they are."""
    root = Path(config.output.save)
    name = f"step_{state.rollouts_done:06d}"
    partial = root / f".partial_{name}"
    try:
        distributed.run_on_rank_zero(lambda: _empty_directory(partial))
        engines.trainer.save(partial)
        _export(config, engines, partial / "hf")
        record = {**asdict(state), "config": config.to_dict(), "versions": versions()}
        text = json.dumps(record, indent=2)
        distributed.run_on_rank_zero(lambda: _commit(partial, root / name, text))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"--save={root}: the checkpoint after rollout {state.rollouts_done} could not be written "
            f"({error}). The latest complete one is {latest(root)}. Free some space, and resume from "
            "it with --load."
        ) from error


def _export(config: TrainConfig, engines: EnginePair, directory: Path) -> None:
    buckets = engines.trainer.weight_buckets(engines.bucket_bytes)
    if distributed.rank() == 0:
        source = Path(config.model.hf_checkpoint)
        export_checkpoint(buckets, directory, source, engines.contract.dtype)
    else:
        for _ in buckets:  # take part in gathering them
            pass


def _empty_directory(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _commit(partial: Path, final: Path, state: str) -> None:
    """Put everything on disk, then give the directory its name."""
    (partial / STATE).write_text(state)
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    partial.rename(final)
    _sync(final.parent)
    logger.info("saved %s", final)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
