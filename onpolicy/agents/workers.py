"""Episodes in worker processes, where a user's function blocks no other for long.

Tokens are sampled, kept and scored in the run's process. A worker gets to know them and asks for
more; it cannot make any.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading

from onpolicy.agents.remote_episode import RemoteEpisode
from onpolicy.agents.worker_link import AgentFunction, WorkerLink
from onpolicy.config.groups.agents import AgentConfig
from onpolicy.errors import AgentError
from onpolicy.rollout.episodes import Episode, Rollouter
from onpolicy.rollout.turns import Turns
from onpolicy.types import Prompt

FEWEST, MOST = 1, 16


class WorkerRollouter(Rollouter):
    """A rollouter that gives each episode to the worker with the fewest; a lost worker is replaced,
    and so is one with a function that does not end.

    `hang_limit`: seconds that a function may compute without awaiting anything, or go on after it
    was cancelled. The episodes of a lost worker fail (AgentError).
    """

    def __init__(self, function: AgentFunction, num_workers: int, hang_limit: float):
        self._function, self._hang_limit = function, hang_limit
        self._links: list[WorkerLink | None] = [None] * num_workers
        self._leaving = list[WorkerLink]()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_closed = False

    async def ready(self) -> None:
        """Start the workers that are missing, and wait for them if no other can take an episode."""
        links = self._live()
        if not any(link.is_ready for link in links):
            await asyncio.gather(*(asyncio.shield(link.started) for link in links))

    async def roll_out(self, prompt: Prompt, turns: Turns) -> Episode:
        links = self._live()
        usable = [link for link in links if link.is_ready] or links
        idlest = min(usable, key=lambda link: len(link.episodes))
        return await idlest.run(RemoteEpisode(next(self._numbers), prompt, turns))

    def _live(self) -> list[WorkerLink]:
        with self._lock:
            if self._is_closed:
                raise AgentError("the run has ended", reason="died")
            for place, link in enumerate(self._links):
                if link is None or link.is_lost or link.is_leaving:
                    self._leaving += [link] if link else []
                    self._links[place] = WorkerLink(self._function, self._hang_limit)
            self._leaving = [link for link in self._leaving if not link.is_lost]
            return [link for link in self._links if link is not None]

    def close(self) -> None:
        """End all workers and their children. Callable from any thread."""
        with self._lock:
            self._is_closed = True
            links = [link for link in self._links if link is not None]
        for link in (*links, *self._leaving):
            link.end()


def num_workers(config: AgentConfig) -> int:
    """Return the number of worker processes of a run."""
    if not (config.custom_generate_function_path or config.environment):
        return 0
    if config.agent_workers is not None:
        return config.agent_workers
    return default_workers()


def default_workers() -> int:
    """Return half the number of cores, within limits: engines and trainer need cores too."""
    return min(max(len(os.sched_getaffinity(0)) // 2, FEWEST), MOST)
