"""The event loop that episodes run in: one thread of the run's process, and not that of the engines.

A rollouter may wait there for anything. One that computes without waiting holds all others up: that
belongs into a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE = 10.0


class EpisodeLoop:
    """A thread with an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks = set[asyncio.Task[None]]()
        threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True).start()

    def begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have the thread begin it. From any thread."""
        self._loop.call_soon_threadsafe(lambda: self._keep(self._loop.create_task(work())))

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Have the thread do it, and wait for what it returns. From any other thread.

        Raises TimeoutError if the thread is held up for `PATIENCE` seconds.
        """
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(PATIENCE)

    def _keep(self, task: asyncio.Task[None]) -> None:
        """A loop alone does not keep a task alive."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@cache
def episode_loop() -> EpisodeLoop:
    """The one of this process."""
    return EpisodeLoop()


os.register_at_fork(after_in_child=episode_loop.cache_clear)
