"""The directory of a run: everything one needs to look at it later, or to repeat it.

config.json  versions.json  contract.json  metrics.jsonl  samples/  logs/  plots/
[governor.jsonl  tensorboard/  wandb/  wandb_run_id]
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from onpolicy.config import TrainConfig
from onpolicy.config.groups import OutputConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.outputs.metrics import (
    JsonlSink,
    Sink,
    TensorBoardSink,
    check_tensorboard,
    drop_from,
)
from onpolicy.outputs.wandb_sink import WandbSink, check_wandb

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

PACKAGES = ("onpolicy", "torch", "sglang", "transformers", "numpy", "safetensors")


class RunDirectory:
    """Created at the start of a run, on rank 0."""

    def __init__(self, path: str, resumes: bool):
        self.path = Path(path)
        if self.metrics_file.exists() and not resumes:
            _move_aside(self.path)
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self.plots.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--run-dir={path}: cannot be written ({error.strerror}).") from error

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    def write_records(
        self, config: TrainConfig, contract: NumericsContract, first_step: int = 0
    ) -> None:
        """Write down what the run was started with; a resumed run repeats moves after its start."""
        drop_from(self.path / "governor.jsonl", first_step)
        records = {
            "config": config.to_dict(),
            "contract": {**json.loads(contract.to_json()), "fingerprint": contract.fingerprint},
            "versions": versions(),
        }
        for name, record in records.items():
            (self.path / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")

    def record_move(self, step: int, before: str, after: str, reason: str) -> None:
        """Add a move of the governor to governor.jsonl."""
        record = {"step": step, "from": before, "to": after, "reason": reason}
        with (self.path / "governor.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    @contextmanager
    def log_file(self) -> Iterator[None]:
        """Also log into logs/train.log, debug messages included."""
        handler = logging.FileHandler(self.logs / "train.log")
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        logging.getLogger().addHandler(handler)
        yield
        logging.getLogger().removeHandler(handler)
        handler.close()

    def sinks(self, config: TrainConfig, first_step: int) -> list[Sink]:
        """metrics.jsonl always; the others if asked for."""
        sinks: list[Sink] = [JsonlSink(self.metrics_file, first_step)]
        if config.output.use_tensorboard:
            sinks.append(TensorBoardSink(self.path / "tensorboard"))
        if config.output.use_wandb:
            sinks.append(WandbSink(config.output, self.path, config.to_dict()))
        return sinks


def check_sinks(output: OutputConfig) -> None:
    """Raise ConfigError if a sink that is asked for could not be opened; opens none."""
    if output.use_tensorboard:
        check_tensorboard()
    if output.use_wandb:
        check_wandb()


def versions() -> Mapping[str, Any]:
    """Versions of what decides a run's numbers."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _move_aside(path: Path) -> None:
    """Keep an earlier run's directory under the next free name: runs/a -> runs/a.1"""
    number = 1
    while (kept := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(kept)
