"""Destinations of a run's metrics."""

import contextlib
import json
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

from onpolicy.config.groups import OutputConfig
from onpolicy.errors import ConfigError, in_one_line
from onpolicy.system import files
from onpolicy.system.json_values import finite, number

logger = logging.getLogger(__name__)


class Sink(ABC):
    """A destination of metrics."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def close(self) -> None:
        """Finish writing."""


class JsonlSink(Sink):
    """A file with one JSON object per line and step, flushed at once. A value that is not finite is
    written by name, since JSON has no number for it: "nan", "inf" or "-inf"."""

    def __init__(self, file: Path, first_step: int):
        drop_from(file, first_step)
        file.touch()
        self._file = file

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        record = json.dumps({"step": step, **finite(metrics)}, allow_nan=False)
        files.append(self._file, record.encode())


class TensorBoardSink(Sink):
    def __init__(self, directory: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def check_tensorboard() -> None:
    """Raise ConfigError if TensorBoard files could not be written."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--use-tensorboard: TensorBoard cannot be imported ({error}). Install it: pip install "
            "tensorboard; or leave the flag out."
        ) from error


def drop_from(file: Path, step: int) -> None:
    """Drop the records of `step` and later ones: a resumed run repeats the steps after its checkpoint.
    Nothing else is lost: lines that are no records move into a file beside it, and are reported."""
    if not file.exists():
        return
    kept, damaged = [], []
    for line in _lines(file):
        record = _record(line)
        if record is None:
            damaged.append(line)
        elif record["step"] < step:
            kept.append(line)
    if damaged:
        aside = file.with_name(f"{file.name}.damaged")
        files.append(aside, b"\n".join(damaged))
        logger.warning("%s: %d lines are no records; they are in %s now", file, len(damaged), aside)
    files.write(file, b"".join(line + b"\n" for line in kept))


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file, without invalid lines."""
    found = filter(None, map(_record, _lines(file)))
    return [{name: number(value) for name, value in record.items()} for record in found]


def _lines(file: Path) -> list[bytes]:
    """Return all lines but empty ones, and a last one cut short by a kill."""
    *lines, last = file.read_bytes().split(b"\n")
    if _record(last) is not None:
        lines.append(last)
    return [line for line in lines if line.strip()]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int
    return record if is_record else None


Answer = TypeVar("Answer")

RUN_ID = "wandb_run_id"
"""The file in the run directory with the id of the run there."""

SERVICE = "wandb-core"
"""The name of wandb's service among a process's children."""

END_SECONDS = 30.0

FINISH_SECONDS = 120
"""Seconds for unsent data at the end of a run; it stays in the run directory."""


class WandbSink(Sink):
    """A sink that continues the run named in `directory`, if there is one. After a resume, steps
    that had been logged before the run was cut short come again, with the same values but for
    times; Weights & Biases keeps the first ones."""

    def __init__(self, output: OutputConfig, directory: Path, config: Mapping[str, Any]):
        self._directory = directory
        self._run: Any = None
        self._run = self._attempt(lambda: self._open(output, config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is not None:
            self._attempt(lambda: self._run.log(dict(metrics), step=step))

    def close(self) -> None:
        if self._run is not None:
            self._attempt(lambda: self._run.finish())

    def _open(self, output: OutputConfig, config: Mapping[str, Any]) -> Any:
        import wandb

        file = self._directory / RUN_ID
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "onpolicy"),
            id=file.read_text().strip() if file.exists() else None,
            resume="allow",
            dir=str(self._directory),
            config=dict(config),
            settings=wandb.Settings(finish_timeout=FINISH_SECONDS, finish_timeout_raises=True),
        )
        file.write_text(f"{run.id}\n")
        return run

    def _attempt(self, call: Callable[[], Answer]) -> Answer | None:
        """Return the result of `call`; if it fails, return None and log nothing there from now on."""
        try:
            return call()
        except Exception as error:  # of its service, the network, the disk: wandb wraps not all
            logger.warning(
                "Weights & Biases failed (%s: %s). The run goes on without it; all metrics are in "
                "metrics.jsonl, and `wandb sync %s` sends what is there.",
                type(error).__name__, in_one_line(error), self._directory / "wandb",
            )  # fmt: skip
            self._run = None
            _end_service()
            return None


def _end_service() -> None:
    """End wandb's service now, and kill it if it hangs: at the end of a process wandb prints a
    traceback of a broken service, and waits for one that hangs."""
    ending = threading.Thread(target=_teardown, daemon=True)
    ending.start()
    ending.join(END_SECONDS)
    if ending.is_alive():
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end in between
                if child.name() == SERVICE:
                    child.kill()


def _teardown() -> None:
    import wandb

    with contextlib.suppress(Exception, SystemExit):  # it exits with the code of a failed service
        wandb.teardown()


def check_wandb(output: OutputConfig) -> None:
    """Have a run that cannot log there log into its directory, and say so. Asks a person at a terminal
    for a key. Accepts WANDB_MODE=offline or disabled. Raises ConfigError if wandb is not installed."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"--use-wandb: wandb cannot be imported ({error}). Install it: pip install wandb; or leave "
            "the flag out."
        ) from error
    try:
        if wandb.setup().settings.mode not in ("offline", "dryrun", "disabled"):
            wandb.login(verify=True)
    except (wandb.Error, ValueError, OSError) as error:
        _log_offline(f"--use-wandb: {_reason(error)}")
        _end_service()  # it has read WANDB_MODE


def _reason(error: Exception) -> str:
    """Return the reason for a failed connection; an unknown mode is one of wandb's ValueErrors."""
    mode = os.environ.get("WANDB_MODE")
    if isinstance(error, ValueError) and mode is not None:
        return f"WANDB_MODE={mode} is no mode of wandb (online, offline, disabled)."
    return in_one_line(error)


def _log_offline(reason: str) -> None:
    remedy = (
        "Run `wandb login`, or set WANDB_API_KEY; set WANDB_MODE=offline to log into the run directory, "
        "for `wandb sync` later."
    )
    logger.warning(
        "%s The run logs into its directory, as with WANDB_MODE=offline. %s", reason, remedy
    )
    os.environ["WANDB_MODE"] = "offline"
