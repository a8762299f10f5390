"""What a tool says to the policy, and what is counted of it in the episode that it is called in."""

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
    """What the policy is to read, whatever happened."""

    fault: str | None = None
    """Why there is no proper answer, in a word. Example: 'time'"""


_counts: ContextVar[Counter[str] | None] = ContextVar("counts of tools", default=None)


def counted(tool: str, observation: Observation) -> Observation:
    """`observation`, counted for the episode under way, if there is one."""
    if (counts := _counts.get()) is not None:
        counts[f"{tool}_calls"] += 1
        if observation.fault:
            counts[f"{tool}_faults/{observation.fault}"] += 1
    return observation


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count what tools say to the code inside, and to the tasks that it begins."""
    counts = Counter[str]()
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)
