"""Tables of differences beyond chance, and of other definitions of a collapse.

Rewards at the end of two arms are compared by an exact permutation test: of all ways to share out their
runs between the arms, the share whose means are at least as far apart, in either direction. Several
tests of one question are adjusted by Holm's method.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from records import WINDOW
from study import CORRECTIONS, RECENT

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from chance import exact_p, holm
from curves import Curves, windows

Case = tuple[str, str]
"""(engine, arm), as in the table of the study."""

ALIGNED, NOTHING, TIS = ("full", "aligned"), ("int3", "nothing"), ("int3", "tis_token")
ROUNDED: Case = ("int3", "aligned_rounded")

OTHERS = [("int3", arm) for arm in CORRECTIONS if arm != TIS[1]]

MASKS = ("geo_rs", "geo_rs_0.01")
LAGGED: list[tuple[Case, Case]] = [
    ((engine, f"{arm}{estimator}, {lag}"), (engine, f"{other}{estimator}, {lag}"))
    for lag in ("lag_1", "lag_4")
    for engine, estimator, arms, others in (
        ("int3", "", MASKS, ("tis_token",)),
        ("bf16", "", ("tis_token", *MASKS, "vcpo", "centered_tis"), ("stale", "tis_token")),
        ("bf16", ", grpo", ("tis_token", *MASKS), ("stale", "tis_token")),
    )
    for arm in arms
    for other in others
    if arm != other
]
"""Corrections of samples that lag, with none and with token TIS in the same setting."""

QUESTIONS: dict[str, list[tuple[Case, Case]]] = {
    "does a mismatch cost reward?": [(ALIGNED, NOTHING), (TIS, NOTHING), (ALIGNED, TIS)],
    "does another correction end above none?": [(other, NOTHING) for other in OTHERS],
    "does it end below token TIS?": [(TIS, other) for other in OTHERS],
    "do the corrections of 2026 differ from none, or from token TIS?": [
        (case, other)
        for case in [("int3", arm) for arm in (*RECENT, "nothing, otb", "tis_token, otb")]
        for other in (NOTHING, TIS)
    ],
    "where samples lag, do they differ from none, or from token TIS?": LAGGED,
    "and where both sides are rounded?": [(ROUNDED, NOTHING), (ROUNDED, TIS), (ALIGNED, ROUNDED)],
}
"""Each with its comparisons, all of which count when it is adjusted."""

SEEDS = 5

COLUMNS = ("question", "difference of", "mean", "p", "Holm", "Holm without seed 0")


def differences(ends: Mapping[Case, Sequence[float]]) -> list[list[str]]:
    """A row for each comparison of a question whose runs are all recorded; ends: the rewards of each
    case's seeds, in their order."""
    rows = []
    for question, pairs in QUESTIONS.items():
        if any(len(ends.get(case, ())) < SEEDS for pair in pairs for case in pair):
            continue
        ps = [exact_p(ends[a], ends[b]) for a, b in pairs]
        later = holm([exact_p(ends[a][1:], ends[b][1:]) for a, b in pairs])
        for (a, b), p, adjusted, without in zip(pairs, ps, holm(ps), later, strict=True):
            mean = fmean(ends[a]) - fmean(ends[b])
            numbers = (f"{mean:+.2f}", *(f"{x:.3f}" for x in (p, adjusted, without)))
            rows.append([question, f"{named(a)} and {named(b)}", *numbers])
    return rows


def named(case: Case) -> str:
    """The arm of a case, after an engine that no other question has."""
    return " ".join(case) if case[0] == "bf16" else case[1]


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
"""Judgements of a run's last 20 rollouts, from its curves and the aligned runs' mean at the end."""


def collapses(curves: Mapping[Case, Sequence[Curves]]) -> list[list[str]]:
    """Returns a row for each case of five seeds: its collapses by each definition."""
    aligned = fmean(windows(each["reward"], WINDOW)[-1] for each in curves[ALIGNED])
    return [
        [
            *case,
            *(f"{sum(is_one(c, aligned) for c in each)} of 5" for is_one in DEFINITIONS.values()),
        ]
        for case, each in curves.items()
        if len(each) == 5
    ]
