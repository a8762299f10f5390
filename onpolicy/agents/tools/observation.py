"""Observations: a tool's answers to the policy, and their counts in the episode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Observation:
    """A tool's answer."""

    text: str
    """The text for the policy to read, in any case."""

    fault: str | None = None
    """The reason in one word why there is no proper answer. Example: 'time'"""


_counts: ContextVar[Counter[str] | None] = ContextVar("counts of tools", default=None)


def counted(tool: str, observation: Observation) -> Observation:
    """Return `observation` after counting it for the episode under way, if there is one."""
    if (counts := _counts.get()) is not None:
        counts[f"{tool}_calls"] += 1
        if observation.fault:
            counts[f"{tool}_faults/{observation.fault}"] += 1
    return observation


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Yield a counter of observations in the context, and in the tasks that start in it."""
    counts = Counter[str]()
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)
