"""Which differences of the study are more than chance, and what counts as a collapse: two more tables.

Rewards at the end of two arms are compared by an exact permutation test: of all ways to share out their
runs between the arms, the share whose means are at least as far apart, in either direction. Several
tests of one question are adjusted by Holm's method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import fmean

from records import WINDOW, Curves, windows
from study import CORRECTIONS

Case = tuple[str, str]
"""(engine, arm), as in the table of the study."""

ALIGNED, NOTHING, TIS = ("full", "aligned"), ("int3", "nothing"), ("int3", "tis_token")
ROUNDED: Case = ("int3", "aligned_rounded")

OTHERS = [("int3", arm) for arm in CORRECTIONS if arm != TIS[1]]

QUESTIONS: dict[str, list[tuple[Case, Case]]] = {
    "does a mismatch cost reward?": [(ALIGNED, NOTHING), (TIS, NOTHING), (ALIGNED, TIS)],
    "does another correction end above none?": [(other, NOTHING) for other in OTHERS],
    "does it end below token TIS?": [(TIS, other) for other in OTHERS],
    "and where both sides are rounded?": [(ROUNDED, NOTHING), (ROUNDED, TIS), (ALIGNED, ROUNDED)],
}
"""Each with its comparisons, all of which count when it is adjusted."""

COLUMNS = ("question", "difference of", "mean", "p", "Holm", "Holm without seed 0")


def exact_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p of the difference of means, over all ways to draw len(a) of the values of both."""
    values, found = [*a, *b], abs(fmean(a) - fmean(b))

    def apart(chosen: tuple[int, ...]) -> float:
        rest = [x for i, x in enumerate(values) if i not in chosen]
        return abs(fmean(values[i] for i in chosen) - fmean(rest))

    ways = list(combinations(range(len(values)), len(a)))
    return sum(apart(way) >= found - 1e-12 for way in ways) / len(ways)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p, in the order given (Scandinavian Journal of Statistics 6, 1979)."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = largest
    return adjusted


def differences(ends: Mapping[Case, Sequence[float]]) -> list[list[str]]:
    """A row for each comparison; ends: the rewards of each case's seeds, in their order."""
    rows = []
    for question, pairs in QUESTIONS.items():
        ps = [exact_p(ends[a], ends[b]) for a, b in pairs]
        later = holm([exact_p(ends[a][1:], ends[b][1:]) for a, b in pairs])
        for (a, b), p, adjusted, without in zip(pairs, ps, holm(ps), later, strict=True):
            mean = fmean(ends[a]) - fmean(ends[b])
            numbers = (f"{mean:+.2f}", *(f"{x:.3f}" for x in (p, adjusted, without)))
            rows.append([question, f"{a[1]} and {b[1]}", *numbers])
    return rows


def half_of_peak(curves: Curves, aligned: float) -> bool:
    rewards = windows(curves["reward"], WINDOW)
    return rewards[-1] < max(rewards) / 2


def below_start(curves: Curves, aligned: float) -> bool:
    rewards = windows(curves["reward"], WINDOW)
    return rewards[-1] < rewards[0]


def half_of_aligned(curves: Curves, aligned: float) -> bool:
    return windows(curves["reward"], WINDOW)[-1] < aligned / 2


DEFINITIONS: dict[str, Callable[[Curves, float], bool]] = {
    "below half of its own peak": half_of_peak,
    "below its own first 20 rollouts": below_start,
    "below half of the aligned runs": half_of_aligned,
}
"""What a run's last 20 rollouts are then; given its curves, and the aligned runs' mean at the end."""


def collapses(curves: Mapping[Case, Sequence[Curves]]) -> list[list[str]]:
    """A row for each case of five seeds: its collapses by each definition."""
    aligned = fmean(windows(each["reward"], WINDOW)[-1] for each in curves[ALIGNED])
    return [
        [
            *case,
            *(f"{sum(is_one(c, aligned) for c in each)} of 5" for is_one in DEFINITIONS.values()),
        ]
        for case, each in curves.items()
        if len(each) == 5
    ]
