"""Episodes in worker processes: what a function of the user's own does there holds nobody up for long.

Tokens are sampled, kept and judged in the run's process. A worker is told of them, and asks for more; it
cannot make any.
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
    """Hands each episode to the worker that has the fewest; a worker that is lost is replaced, and so is
    one that has a function which does not end.

    `hang_limit`: seconds that a function may compute without awaiting anything, and go on when it was
    cancelled. What a lost worker was at has failed (AgentError).
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
        """End all workers, and what they began. From any thread."""
        with self._lock:
            self._is_closed = True
            links = [link for link in self._links if link is not None]
        for link in (*links, *self._leaving):
            link.end()


def num_workers(config: AgentConfig) -> int:
    """Those of a run."""
    if not (config.custom_generate_function_path or config.environment):
        return 0
    if config.agent_workers is not None:
        return config.agent_workers
    return default_workers()


def default_workers() -> int:
    """Half as many as there are cores, within limits: engines and trainer want them too."""
    return min(max(len(os.sched_getaffinity(0)) // 2, FEWEST), MOST)
