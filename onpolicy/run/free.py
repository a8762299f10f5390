"""Rollouts as they come: engines always draw, a push interrupts them, and the clock decides the batches.

What it has decided is in the run's journal of rollouts, from which `Replayed` repeats the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

from onpolicy.rollout.base import EndlessJob
from onpolicy.rollout.episodes import OpenEpisode
from onpolicy.rollout.free_groups import FreeGroups
from onpolicy.rollout.open_groups import OpenGroup
from onpolicy.rollout.sampling import require_version
from onpolicy.run.ahead import Drawing
from onpolicy.run.engines import EnginePair
from onpolicy.run.sampler import Rollout, Sampler
from onpolicy.trajectory import Completion
from onpolicy.types import Request


class FreeRollouts(Drawing):
    """A step takes the groups that are complete first; `open_groups` says which that may be."""

    def __init__(self, sampler: Sampler, open_groups: FreeGroups, engines: EnginePair):
        super().__init__(engines)
        self._sampler, self._open, self._lock = sampler, open_groups, threading.Lock()
        self._job = EndlessJob([], self._on_answer)
        self._episodes: list[OpenEpisode] = []
        self._version = self._tokens = 0
        self._waited = self._drew_before = 0.0

    def take(self, step: int) -> Rollout:
        self._version, self._episodes = step, self._open.begin(step)
        self._job = EndlessJob([each.request() for each in self._episodes], self._on_answer)
        self._sampler.on_requests(len(self._episodes))
        self._begin(partial(self._engines.work, self._job, self._push_again))
        started = time.perf_counter()
        while (groups := self._batch()) is None:
            self._hear()
        self._waited = time.perf_counter() - started
        return self._sampler.finish(
            groups, self._drawn_since_last(), self._drew_before + self._waited
        )

    def _drawn_since_last(self) -> int:
        """Tokens of answers since the last rollout was taken."""
        with self._lock:
            tokens, self._tokens = self._tokens, 0
        return tokens

    def _batch(self) -> list[OpenGroup] | None:
        with self._lock:
            return self._open.batch()

    def settle(self) -> float:
        """Interrupt what is being drawn; what there is of it goes on under the next weights."""
        self._job.interrupt()
        seconds = super().settle()
        self._drew_before = max(seconds - self._waited, 0.0)
        return seconds

    def _on_answer(self, number: int, completion: Completion) -> Sequence[Request]:
        """In the thread."""
        if completion.response_ids:
            require_version(completion, self._version, by_token=True)
        with self._lock:
            episodes = self._open.answer(self._episodes[number], completion)
            self._episodes += episodes
            self._tokens += len(completion.response_ids)
            requests = [episode.request() for episode in episodes]
        self._messages.put("news")
        return requests
