"""Where the metrics of a run go."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onpolicy.errors import ConfigError


class Sink(ABC):
    """A place that metrics go to."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def close(self) -> None:
        """Finish writing."""


class JsonlSink(Sink):
    """One JSON object per line and step, written through at once."""

    def __init__(self, file: Path, first_step: int):
        drop_from(file, first_step)
        self._file = file.open("a")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


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
    """Drop the lines of `step` and later ones: a resumed run repeats what follows its checkpoint."""
    if file.exists():
        kept = [record for record in read_jsonl(file) if record["step"] < step]
        partial = file.with_suffix(".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
        partial.replace(file)


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line cut short by a kill is left out."""
    records = []
    for line in file.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
