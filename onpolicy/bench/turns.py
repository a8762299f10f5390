"""Measurements in turns: medians, and the ratio of neighbours."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from onpolicy.outputs.console import duration

T = TypeVar("T")

logger = logging.getLogger(__name__)

Measure = Callable[[], float]
"""A function that runs once and returns tokens per second."""


def compare_in_turns(measures: Mapping[str, Measure], repetitions: int) -> dict[str, Any]:
    """Warm all up, measure in turns, and compare medians: each by its name, and `ratio`."""
    return compare(take_turns(measures, 1, repetitions))


def compare(runs: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the medians of each, and `ratio`, of the first to the second: the median of
    neighbours'.

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
    measures: Mapping[str, Callable[[], T]], warm_up: int, repetitions: int
) -> dict[str, list[T]]:
    """Return the results of `repetitions` turns, by name.

    Warm-up turns come first and are discarded; they are timed, and the expected duration of the
    rest is logged.
    """
    started = time.perf_counter()
    for _ in range(warm_up):
        for measure in measures.values():
            measure()
    if warm_up:
        spent = time.perf_counter() - started
        left = duration(repetitions / warm_up * spent)
        logger.info("warmed up in %s; about %s more", duration(spent), left)
    runs: dict[str, list[T]] = {name: [] for name in measures}
    for _ in range(repetitions):
        for name, measure in measures.items():
            runs[name].append(measure())
    return runs


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
