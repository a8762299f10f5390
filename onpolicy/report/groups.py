"""Puts runs together that differ only in their seed, and names what comes out."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath
from typing import Any

from onpolicy.config.settings import DECIDE_NO_RESULT
from onpolicy.report.runs import Curve, LoggedRun

NOT_THE_EXPERIMENT = DECIDE_NO_RESULT | {"seed"}
"""Configuration values that may differ inside a group: the seed, and what decides no result."""

MOST_VALUES_IN_A_NAME = 3
"""Groups that differ in more values than that are named by their directories."""


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """Repetitions of one experiment."""

    name: str
    runs: tuple[int, ...]
    """Positions of its runs."""


def group_runs(runs: Sequence[LoggedRun]) -> list[RunGroup]:
    """Groups in the order of their first runs; a run without a configuration is its own group."""
    members: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        members.setdefault(_experiment(run, position), []).append(position)
    names = _names([[runs[position] for position in group] for group in members.values()])
    return [
        RunGroup(name=name, runs=tuple(group))
        for name, group in zip(names, members.values(), strict=True)
    ]


def median_curve(curves: Iterable[Curve]) -> Curve:
    """At each step the median of the finite values there; NaN where there are none."""
    by_step: dict[int, list[float]] = {}
    for curve in curves:
        for step, value in curve.items():
            by_step.setdefault(step, []).extend([value] if math.isfinite(value) else [])
    return {
        step: statistics.median(values) if values else math.nan
        for step, values in sorted(by_step.items())
    }


def _experiment(run: LoggedRun, position: int) -> str:
    """Equal for two runs if they repeat the same experiment."""
    if run.config is None:
        return f"run {position}"
    return json.dumps(_settings(run), sort_keys=True)


def _settings(run: LoggedRun) -> dict[str, Any]:
    return {k: v for k, v in (run.config or {}).items() if k not in NOT_THE_EXPERIMENT}


def _names(groups: Sequence[Sequence[LoggedRun]]) -> list[str]:
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
    """A value as it stands in a name: of a path its end."""
    if isinstance(value, str) and "/" in value:
        return PurePath(value).name
    return value if isinstance(value, str) and value else json.dumps(value)


def _common_name(names: Sequence[str]) -> str:
    """What the runs' names begin with: ["tis-seed1", "tis-seed2"] -> "tis"."""
    if len(names) == 1:
        return names[0]
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    start = "".join(letters[0] for letters in same)
    return re.sub(r"[-_./ ]+(seed|s)?[-_.= ]*$", "", start) or names[0]
