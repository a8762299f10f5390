"""Time limit of an episode, which does not count the time spent waiting for the policy."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from onpolicy.rollout.failures import EpisodeTimeoutError

T = TypeVar("T")

logger = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds within which a cancelled function should have ended."""

_LEAST_PAUSE = 0.05
"""Least seconds between two checks of an episode whose time is nearly up."""


class Stopwatch:
    """A stopwatch that runs while an episode's function runs; started and stopped from any thread."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = time.monotonic()

    def stop(self) -> None:
        if self._since is not None:
            self._before, self._since = self.seconds, None

    def start(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        since = self._since
        return self._before + (0.0 if since is None else time.monotonic() - since)


async def within(
    limit: float | None, watch: Stopwatch, work: Coroutine[Any, Any, T], name: str = ""
) -> T:
    """Return the result of `work`, cancelling it after `limit` seconds on the watch.

    Raises EpisodeTimeoutError then, whether or not the work heeds its cancellation; if it does not,
    a warning with `name` is logged.
    """
    if limit is None:
        return await work
    task = asyncio.create_task(work)
    try:
        while (left := limit - watch.seconds) > 0:
            done, _ = await asyncio.wait({task}, timeout=max(left, _LEAST_PAUSE))
            if done:
                return task.result()
        raise EpisodeTimeoutError(
            f"took more than --episode-time-limit={limit:g} seconds besides sampling"
        )
    finally:
        if task.cancel():
            asyncio.get_running_loop().call_later(PATIENCE, _say_if_it_stays, task, name)


def _say_if_it_stays(cancelled: asyncio.Task[Any], name: str) -> None:
    if not cancelled.done():
        logger.warning(
            "%s: a function goes on %g seconds after it was cancelled, and stays in this process. Have "
            "it end when CancelledError is raised in it.",
            name, PATIENCE,
        )  # fmt: skip
