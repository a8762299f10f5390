"""Things measured in turns: medians, and the ratio of neighbours."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from onpolicy.outputs.console import duration

logger = logging.getLogger(__name__)

Measure = Callable[[], float]
"""Runs once and returns tokens per second."""


def alternate(measures: Mapping[str, Measure], repetitions: int) -> dict[str, Any]:
    """Warm both up, measure in turns, and compare medians: each by its name, and `ratio`."""
    measured = take_turns(list(measures.values()), 1, repetitions)
    return compare(dict(zip(measures, measured, strict=True)))


def compare(runs: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians of each, and `ratio`, of the first to the second: the median of neighbours'.

    The first's ratio to each further one is in `ratio_to`, by its name.
    """
    first, second, *further = runs.values()
    result: dict[str, Any] = {
        kind: {"tokens_per_second": median(values), "runs": list(values)}
        for kind, values in runs.items()
    }
    result["ratio"] = _ratio(first, second)
    if further:
        names = list(runs)[2:]
        result["ratio_to"] = {name: _ratio(first, runs[name]) for name in names}
    return result


def _ratio(first: Sequence[float], second: Sequence[float]) -> float:
    return median(a / b for a, b in zip(first, second, strict=True))


def take_turns(
    measures: Sequence[Callable[[], Any]], warm_up: int, repetitions: int
) -> list[list[Any]]:
    """What each returned in `repetitions` turns, after `warm_up` that are thrown away and timed.

    Logs how long the others will take.
    """
    started = time.perf_counter()
    for _ in range(warm_up):
        for measure in measures:
            measure()
    spent = time.perf_counter() - started
    logger.info(
        "warmed up in %s; about %s more", duration(spent), duration(repetitions / warm_up * spent)
    )
    runs: list[list[Any]] = [[] for _ in measures]
    for _ in range(repetitions):
        for values, measure in zip(runs, measures, strict=True):
            values.append(measure())
    return runs
