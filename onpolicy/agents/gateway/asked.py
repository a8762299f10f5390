"""An answer that clients of a session wait for, got, or left."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from onpolicy.agents.gateway.known import KnownTurn


@dataclass(slots=True, eq=False)
class Asked:
    """One answer that was asked for. It is sampled to its end, whether or not its client waits for it:
    how far it came when the client left would be the clock's to say."""

    sampling: asyncio.Task[KnownTurn]

    is_wanted: bool = True
    """Whether a client waits for it or has got it. If not, the next equal request gets it."""

    @property
    def turn(self) -> KnownTurn | None:
        """The answer, if there is one."""
        task = self.sampling
        is_there = task.done() and not task.cancelled() and task.exception() is None
        return task.result() if is_there else None

    @property
    def is_left(self) -> bool:
        """Whether an equal request is to get it."""
        return not self.is_wanted and (not self.sampling.done() or self.turn is not None)
