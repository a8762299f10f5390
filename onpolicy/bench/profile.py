"""`onpolicy bench step --profile`: a step of each side, operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from onpolicy.bench.stopwatch import BACKWARD, FORWARD, ROWS
from onpolicy.bench.turns import take_turns

TOTAL = "step"

Seconds = Mapping[tuple[str, str], float]
"""Seconds of the rows of one step, each FORWARD or BACKWARD; see `Stopwatch`."""


def profile(
    measures: Mapping[str, Callable[[], Seconds]], repetitions: int
) -> list[dict[str, Any]]:
    """Profile both sides in turns: return each row's medians, and the ratio of neighbours.

    A ratio is the second side's time over the first's: throughput of the first over the second's.
    """
    runs = take_turns(measures, 0, repetitions)
    steps = [step for steps in runs.values() for step in steps]
    rows = [(row, phase) for row in ROWS for phase in (FORWARD, BACKWARD)]
    table = [
        _row(
            row,
            phase,
            {side: [step.get((row, phase), 0.0) for step in runs[side]] for side in runs},
        )
        for row, phase in rows
        if any(step.get((row, phase)) for step in steps)
    ]
    whole = {side: [sum(step.values()) for step in runs[side]] for side in runs}
    return [*table, _row(TOTAL, "", whole)]


def _row(name: str, phase: str, runs: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    first, second = runs.values()
    ratios = [theirs / ours for ours, theirs in zip(first, second, strict=True) if ours and theirs]
    return {
        "row": name,
        "phase": phase,
        **{
            side: {"seconds": median(values), "runs": list(values)} for side, values in runs.items()
        },
        "ratio": median(ratios) if ratios else None,
    }


def table(rows: Sequence[Mapping[str, Any]], sides: Sequence[str]) -> str:
    """Return a few lines for a terminal: milliseconds of each side, and the ratio."""
    return "\n".join(_lines(rows, sides))


def _lines(rows: Sequence[Mapping[str, Any]], sides: Sequence[str]) -> Iterator[str]:
    first, second = sides
    yield f"{'':28}{first:>12}{second:>12}{'ratio':>8}   milliseconds, {second} / {first}"
    for row in rows:
        times = "".join(f"{1e3 * row[side]['seconds']:12.1f}" for side in sides)
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        yield f"{row['row'] + ' ' + row['phase']:28}{times}{ratio:>8}"
