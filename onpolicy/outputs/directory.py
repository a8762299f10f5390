"""Directory of a run: everything needed to look at it later, or to repeat it.

    config.json  versions.json  contract.json  metrics.jsonl  samples/  logs/
    [governor.jsonl  rollouts.jsonl  observations.jsonl  tensorboard/  wandb/ and others]

One run writes there at a time. Every file except logs is written whole or not at all; a full disk
ends the run with an error that says how to go on.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from onpolicy.config.flags import spelled
from onpolicy.config.groups import OutputConfig
from onpolicy.config.settings import same_run
from onpolicy.config.sft_flags import AnyRun
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError, OutputError
from onpolicy.outputs import metrics
from onpolicy.outputs.console import Visible
from onpolicy.outputs.lock import locked
from onpolicy.outputs.trackers import TrackerSink, trackers
from onpolicy.system import files

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

PACKAGES = ("onpolicy", "torch", "sglang", "transformers", "numpy", "safetensors")

READ = (
    "hf_checkpoint", "ref_checkpoint", "critic_load", "teacher_checkpoint", "prompt_data",
    "eval_prompt_data", "eval_config", "replay",
)  # fmt: skip
"""Flags with a path that a run reads from."""


class RunDirectory:
    """The run's directory, created on rank 0 and locked until `close`. An earlier run's directory
    is moved aside, unless this run resumes it. That is refused if it holds a path that this run
    uses: `needed` has these paths, by their flags."""

    def __init__(self, path: str, resumes: bool, needed: Mapping[str, str] | None = None):
        self.path = Path(path)
        self.metrics_file, self.samples = self.path / "metrics.jsonl", self.path / "samples"
        self.logs = self.path / "logs"
        self.rollouts = self.path / "rollouts.jsonl"
        """The decisions that depended on the clock (`recorded_order`)."""

        self.observations = self.path / "observations.jsonl"
        self._held = ExitStack()
        self._held.enter_context(locked(self.path, "--run-dir"))
        if self.metrics_file.exists() and not resumes:
            _move_aside(self.path, needed or {})
            self._held.enter_context(locked(self.path, "--run-dir"))
        with self.writing():
            if not resumes:  # left by a run that never logged metrics
                self.observations.unlink(missing_ok=True)
            self.logs.mkdir(exist_ok=True)

    @classmethod
    def of(cls, config: AnyRun, resumed: Mapping[str, Any] | None) -> RunDirectory:
        """Return the directory of a run; `resumed`: the configuration of its checkpoint."""
        path, now = config.output.run_dir, config.to_dict()
        resumes = resumed is not None and _holds_one_of(Path(path), resumed, now)
        read = READ if resumed is None else (*READ, "load", "save")
        needed: dict[str, str] = {}
        for name in read:
            places = now.get(name) or ()
            for place in [places] if isinstance(places, str) else places:
                needed[f"{spelled(name)} {place}"] = _path_of(place)
        directory = cls(path, resumes, needed)
        if config.output.group_can_read:
            for each in filter(None, (path, config.output.save)):
                Path(each).chmod(files.GROUP_TOO)
        return directory

    def close(self) -> None:
        """Release the lock, so that other runs may write there."""
        self._held.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raise OutputError for a full disk and similar errors while the context writes there."""
        try:
            yield
        except OutputError:
            raise
        except OSError as error:
            if not self.path.is_dir():
                raise OutputError(
                    f"--run-dir={self.path}: the directory was removed while the run wrote there, and "
                    "what it held is lost; checkpoints under --save are not, unless they were in it. "
                    "Start again, with --load if there are checkpoints, and leave the directory alone."
                ) from error
            raise OutputError(
                f"--run-dir={self.path}: {error.filename or 'a file there'} could not be written "
                f"({error.strerror or error}). Nothing that was written before is lost, nor any "
                "checkpoint. Free some space and start again, with --load if there are checkpoints."
            ) from error

    def write_records(
        self, config: AnyRun, contract: NumericsContract, first_step: int = 0
    ) -> None:
        """Write the configuration, contract and versions; drop governor moves to come again."""
        records = {
            "config": config.to_dict(),
            "contract": {**json.loads(contract.to_json()), "fingerprint": contract.fingerprint},
            "versions": versions(),
        }
        with self.writing():
            metrics.drop_from(self.path / "governor.jsonl", first_step)
            for name, record in records.items():
                files.write(self.path / f"{name}.json", json.dumps(record, indent=2) + "\n")

    def record_move(self, step: int, before: str, after: str, reason: str) -> None:
        """Add a move of the governor to governor.jsonl."""
        record = {"step": step, "from": before, "to": after, "reason": reason}
        with self.writing():
            files.append(self.path / "governor.jsonl", json.dumps(record).encode())

    @contextmanager
    def log_file(self) -> Iterator[None]:
        """Log into logs/train.log too, debug messages included."""
        with self.writing():
            handler = _LogFile(self.logs / "train.log")
        handler.setFormatter(Visible(LOG_FORMAT))
        logging.getLogger().addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(handler)
            with suppress(OSError):  # it has said so
                handler.close()

    @contextmanager
    def opened_sinks(self, config: AnyRun, first_step: int) -> Iterator[list[metrics.Sink]]:
        """Yield the sinks, and close them at the end."""
        with self.writing():
            sinks = self.sinks(config, first_step)
        failed = True
        try:
            yield sinks
            failed = False
        finally:
            for sink in sinks:
                sink.close(failed)

    def sinks(self, config: AnyRun, first_step: int) -> list[metrics.Sink]:
        """Return the sinks: metrics.jsonl always; the others if asked for."""
        sinks: list[metrics.Sink] = [metrics.JsonlSink(self.metrics_file, first_step)]
        for kind in trackers(config.output):
            sinks.append(TrackerSink(kind, self.path, config.to_dict()))
        return sinks


class _LogFile(logging.FileHandler):
    """A log file that reports a full disk once, where Python's prints a traceback for every line."""

    _is_full = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_full:
            self._is_full = True
            print(f"{self.baseFilename} could not be written ({error.strerror})", file=sys.stderr)


def _path_of(place: str) -> str:
    """Return the path in PATH or in NAME=PATH."""
    named = place.partition("=")[2]
    return named if named and not Path(place).exists() else place


def check_sinks(output: OutputConfig) -> None:
    """Raise ConfigError if a requested sink could not be opened; open none."""
    for kind in trackers(output):
        kind.check()


def versions() -> Mapping[str, Any]:
    """Return the versions of everything that determines a run's numbers."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _holds_one_of(directory: Path, *configs: Mapping[str, Any]) -> bool:
    try:
        recorded = json.loads((directory / "config.json").read_bytes())
        return any(same_run(recorded, config) for config in configs)
    except (OSError, ValueError, AttributeError):
        return False


def _move_aside(path: Path, needed: Mapping[str, str]) -> None:
    """Move an earlier run's directory to the next free name: runs/a -> runs/a.1"""
    path = path.resolve()
    for name, place in {"the current directory": ".", **needed}.items():
        if Path(place).resolve().is_relative_to(path):
            raise ConfigError(
                f"--run-dir={path}: holds an earlier run, which cannot be moved aside with {name} in "
                "it. Give a directory of its own, or resume that run with --load."
            )
    number = 1
    while (kept := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    try:
        path.rename(kept)
    except OSError as error:
        raise ConfigError(
            f"--run-dir={path}: holds an earlier run, which cannot be moved aside to {kept} "
            f"({error.strerror}). Give another directory."
        ) from error
