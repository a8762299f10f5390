"""Event loop of the episodes: one thread of the run's process, separate from the engines' loop.

A rollouter may wait there for anything. One that computes without waiting blocks all others, and
belongs in a process of its own.
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
        """Start the work in the thread. Callable from any thread."""
        self._loop.call_soon_threadsafe(lambda: self._keep(self._loop.create_task(work())))

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the work in the thread; return its result. Raises TimeoutError if that is blocked."""
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(PATIENCE)

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Hold a reference to the task, since a loop alone does not keep it alive."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@cache
def episode_loop() -> EpisodeLoop:
    """Return the event loop of this process."""
    return EpisodeLoop()


os.register_at_fork(after_in_child=episode_loop.cache_clear)
