"""Data of runs for `onpolicy report`: configuration, curves, governor's moves; and groups of runs
that differ only in their seed."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Any

from onpolicy.config.settings import DECIDE_NO_RESULT
from onpolicy.errors import ConfigError
from onpolicy.system.json_values import number as number_of

Curve = dict[int, float]
"""The value at each step that has one; NaN and infinity are kept as logged."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """A move of the governor from one rung of its ladder to another."""

    step: int
    source: str
    target: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A run, read from its directory."""

    name: str
    """The end of its path, long enough to tell it from the others."""

    config: dict[str, Any] | None
    directory: Path | None = None
    """The run directory; None where a metrics file was given under another name."""

    curves: dict[str, Curve] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)


def read_runs(paths: Sequence[str]) -> list[LoggedRun]:
    """Read every run once, in the order given. Raises ConfigError for one that cannot be read."""
    files = list(dict.fromkeys(_metrics_file(path).resolve() for path in paths))
    places = [file.parent if _is_of_a_directory(file) else file for file in files]
    return [_read_run(file, name) for file, name in zip(files, _names(places), strict=True)]


def _metrics_file(path: str) -> Path:
    file = Path(path) / "metrics.jsonl" if Path(path).is_dir() else Path(path)
    if file.is_file():
        return file
    rule = "has no metrics.jsonl" if Path(path).is_dir() else "no such directory or file"
    raise ConfigError(f"RUN={path}: {rule}. Give the --run-dir of a run, or its metrics.jsonl.")


def _names(places: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ from each other."""
    length = 1
    while len({place.parts[-length:] for place in places}) < len(places):
        length += 1
    return ["/".join(place.parts[-length:]) for place in places]


def _is_of_a_directory(file: Path) -> bool:
    """Return whether the files beside a metrics file belong to the same run."""
    return file.name == "metrics.jsonl"


def _read_run(file: Path, name: str) -> LoggedRun:
    config, moves = file.with_name("config.json"), file.with_name("governor.jsonl")
    beside = _is_of_a_directory(file)
    return LoggedRun(
        name=name,
        directory=file.parent if beside else None,
        config=_read_config(config) if beside and config.exists() else None,
        curves=_read_curves(file),
        moves=_read_moves(moves) if beside and moves.exists() else [],
    )


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON ({error}). Mend it or move it away.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: must be a JSON object. Mend it or move it away.")
    return config


def _read_curves(file: Path) -> dict[str, Curve]:
    """Return the curves by metric. Several lines for a step, as with an evaluation, are merged."""
    curves: dict[str, Curve] = {}
    for step, record in _records(file):
        for name, said in record.items():
            value = number_of(said)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                curves.setdefault(name, {})[step] = value
    curves.pop("step", None)
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _read_moves(file: Path) -> list[Move]:
    return [
        Move(
            step=step,
            source=str(record.get("from", "")),
            target=str(record.get("to", "")),
            reason=str(record.get("reason", "")),
        )
        for step, record in _records(file)
    ]


def _records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield step and record of each line; a last line cut short by a kill is left out."""
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return
            raise malformed(file, number, f"not JSON ({error})") from error
        if record is None:
            continue
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise malformed(file, number, 'must be an object with a whole number as "step"')
        yield record["step"], record


def malformed(file: Path, number: int, rule: str) -> ConfigError:
    """Return the error of a line that cannot be read."""
    return ConfigError(f"{file}:{number}: {rule}. Mend or delete the line.")


NOT_THE_EXPERIMENT = DECIDE_NO_RESULT | {"seed"}
"""Configuration values that may differ inside a group: the seed, and flags that affect no result.
"""

MOST_VALUES_IN_A_NAME = 3
"""The most differing values in a group's name; beyond that, groups are named by their directories.
"""


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """Repetitions of one experiment."""

    name: str
    runs: tuple[int, ...]
    """Positions of its runs."""


def group_runs(runs: Sequence[LoggedRun]) -> list[RunGroup]:
    """Return groups in the order of their first runs; a run without a configuration is its own
    group."""
    members: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        members.setdefault(_experiment(run, position), []).append(position)
    names = _group_names([[runs[position] for position in group] for group in members.values()])
    return [
        RunGroup(name=name, runs=tuple(group))
        for name, group in zip(names, members.values(), strict=True)
    ]


def median_curve(curves: Iterable[Curve]) -> Curve:
    """Return the median of the finite values at each step; NaN where there are none."""
    by_step: dict[int, list[float]] = {}
    for curve in curves:
        for step, value in curve.items():
            by_step.setdefault(step, []).extend([value] if math.isfinite(value) else [])
    return {
        step: statistics.median(values) if values else math.nan
        for step, values in sorted(by_step.items())
    }


def _experiment(run: LoggedRun, position: int) -> str:
    """Return a key that two runs share if they repeat the same experiment."""
    if run.config is None:
        return f"run {position}"
    return json.dumps(_settings(run), sort_keys=True)


def _settings(run: LoggedRun) -> dict[str, Any]:
    return {k: v for k, v in (run.config or {}).items() if k not in NOT_THE_EXPERIMENT}


def _group_names(groups: Sequence[Sequence[LoggedRun]]) -> list[str]:
    settings = [_settings(group[0]) for group in groups]
    keys = [key for key in _keys(settings) if len({repr(s.get(key)) for s in settings}) > 1]
    comparable = all(group[0].config is not None for group in groups)
    if comparable and 0 < len(keys) <= MOST_VALUES_IN_A_NAME:
        by_value = [", ".join(f"{key}={_short(s.get(key))}" for key in keys) for s in settings]
        if len(set(by_value)) == len(groups):
            return by_value
    by_directory = [_common_name([run.name for run in group]) for group in groups]
    if len(set(by_directory)) == len(groups):
        return by_directory
    return [group[0].name for group in groups]


def _keys(settings: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for each in settings for key in each))


def _short(value: Any) -> str:
    """Return a value for a name: for a path its last part."""
    if isinstance(value, str) and "/" in value:
        return PurePath(value).name
    return value if isinstance(value, str) and value else json.dumps(value)


def _common_name(names: Sequence[str]) -> str:
    """Return the common beginning of the runs' names: ["tis-seed1", "tis-seed2"] -> "tis"."""
    if len(names) == 1:
        return names[0]
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    start = "".join(letters[0] for letters in same)
    return re.sub(r"[-_./ ]+(seed|s)?[-_.= ]*$", "", start) or names[0]
