"""Answer that a session's clients wait for, received, or abandoned."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from onpolicy.agents.gateway.known import KnownTurn


@dataclass(slots=True, eq=False)
class Asked:
    """One requested answer. It is sampled to its end, whether or not its client waits for it: if a
    client's leaving stopped it, its length would depend on the clock."""

    sampling: asyncio.Task[KnownTurn]

    is_wanted: bool = True
    """Whether a client waits for it or has received it. If not, the next equal request gets it."""

    @property
    def turn(self) -> KnownTurn | None:
        """The answer, if there is one."""
        task = self.sampling
        is_there = task.done() and not task.cancelled() and task.exception() is None
        return task.result() if is_there else None

    @property
    def is_left(self) -> bool:
        """Whether the next equal request gets it."""
        return not self.is_wanted and (not self.sampling.done() or self.turn is not None)
