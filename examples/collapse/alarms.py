"""Alarms before a collapse: when each would have rung in the recorded runs, and where in vain.

An alarm reads a run's curves one rollout after the other. A collapse begins at the first rollout at
which the mean reward of the last `WINDOW` is below half of the best such mean before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

from records import WINDOW, summary

from fallback_correction.length_decay import SurgeDetector

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from curves import Curves, windows

COLUMNS = ("alarm", "engine", "before a collapse", "rollouts before it", "false alarms")

IN_A_ROW = 2
"""Rollouts beyond a limit that ring an alarm, as they move the governor."""

Alarm = Callable[[Curves], int | None]
"""The rollout at which it rings; None: it does not."""


def beyond(curve: str, is_beyond: Callable[[float], bool]) -> Alarm:
    """An alarm of a curve that is beyond a limit in `IN_A_ROW` rollouts."""

    def rings(curves: Curves) -> int | None:
        count = 0
        for rollout, value in enumerate(curves[curve]):
            count = count + 1 if is_beyond(value) else 0
            if count == IN_A_ROW:
                return rollout
        return None

    return rings


def surge(curves: Curves) -> int | None:
    """The rollout at which length decay's detector confirms that answers surge."""
    detector = SurgeDetector()
    for rollout, (length, cut) in enumerate(
        zip(curves["length"], curves["truncated"], strict=True)
    ):
        detector.update(length, cut)
        if detector.onset is not None:
            return rollout
    return None


ALARMS: dict[str, tuple[str, Alarm]] = {
    "ESS below 0.95": ("ess", beyond("ess", lambda ess: ess < 0.95)),
    "ESS below 0.9": ("ess", beyond("ess", lambda ess: ess < 0.9)),
    "ESS below 0.8": ("ess", beyond("ess", lambda ess: ess < 0.8)),
    "k3 above 0.001": ("k3", beyond("k3", lambda k3: k3 > 1e-3)),
    "surge of lengths": ("length", surge),
}
"""{alarm: (a curve that it reads and not every run has, when it rings)}"""


def collapse(curves: Curves) -> int | None:
    """The rollout at which a collapse begins; None in a run that has not collapsed at its end."""
    if not summary(curves)["collapsed"]:
        return None
    best = 0.0
    for rollout, reward in enumerate(windows(curves["reward"], WINDOW), start=WINDOW - 1):
        if reward < best / 2:
            return rollout
        best = max(best, reward)
    raise AssertionError("a collapsed run has such a rollout")


def rows(runs: Mapping[str, list[Curves]]) -> list[list[str]]:
    """A row for each alarm and engine; runs: the curves of each engine's runs, of which those count
    that have what the alarm reads."""
    return [
        [name, engine, *judged(rings, [run for run in curves if read in run])]
        for name, (read, rings) in ALARMS.items()
        for engine, curves in runs.items()
    ]


def judged(rings: Alarm, runs: list[Curves]) -> list[str]:
    """The cells of an alarm's row: collapses that it announced, its lead, and false alarms."""
    found = [(rings(curves), collapse(curves)) for curves in runs]
    leads = [end - alarm for alarm, end in found if None not in (alarm, end) and alarm < end]
    collapsed = sum(end is not None for _, end in found)
    false = sum(alarm is not None for alarm, end in found if end is None)
    lead = f"{median(leads):.0f} ({min(leads)} to {max(leads)})" if leads else "-"
    return [f"{len(leads)} of {collapsed}", lead, f"{false} of {len(found) - collapsed}"]
