"""Destinations of a run's metrics."""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onpolicy.system import files
from onpolicy.system.json_values import finite, number

logger = logging.getLogger(__name__)


class Sink(ABC):
    """A destination of metrics."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def close(self, failed: bool = False) -> None:
        """Finish writing; `failed`: the run ended with an error."""


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
