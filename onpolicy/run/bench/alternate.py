"""Two things measured in turns: medians, and the ratio of neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

Measure = Callable[[], float]
"""Runs once and returns tokens per second."""


def alternate(measures: Mapping[str, Measure], repetitions: int) -> dict[str, Any]:
    """Warm both up, measure in turns, and compare medians: each by its name, and `ratio`."""
    for measure in measures.values():
        measure()
    runs: dict[str, list[float]] = {kind: [] for kind in measures}
    for _ in range(repetitions):
        for kind, measure in measures.items():
            runs[kind].append(measure())
    result: dict[str, Any] = {
        kind: {"tokens_per_second": median(values), "runs": values} for kind, values in runs.items()
    }
    ratios = [first / second for first, second in zip(*runs.values(), strict=True)]
    return {**result, "ratio": median(ratios)}
