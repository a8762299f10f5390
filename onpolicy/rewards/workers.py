"""Rules and functions in worker processes, with a time limit for each call that really ends it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing.context import SpawnContext
from typing import Any

from pebble import ProcessExpired, ProcessPool

from onpolicy.config.groups import RewardConfig
from onpolicy.config.groups.reward import is_function
from onpolicy.rewards import Answers, Failure, Numbers, worker
from onpolicy.system import private_directory
from onpolicy.types import Sample

FEWEST_WORKERS, MOST_WORKERS = 4, 32

START_SECONDS = 120.0
"""How long a worker may take to import a rule, besides the time limit of a call."""


class _Spawn(SpawnContext):
    """Starts processes anew, since a fork of one with threads, or with a GPU, may hang.

    It keeps its locks: pebble drops them, and their names with them, before it ends its workers, and a
    worker that is still starting would look for those names, and print a traceback.
    """

    def __init__(self) -> None:
        self._locks: list[Any] = []

    def RLock(self) -> Any:
        self._locks.append(super().RLock())
        return self._locks[-1]

    def drop_locks(self) -> None:
        self._locks.clear()


class Workers:
    """Processes that have imported the rules."""

    def __init__(self, config: RewardConfig, rules: Sequence[str], count: int = 0):
        self.config = config
        private_directory.of_this_process()  # its semaphores outlive all of us being killed at once
        paths = [rule for rule in rules if is_function(rule)]
        names = [rule for rule in rules if not is_function(rule)]
        self._context = _Spawn()
        self._pool = ProcessPool(
            max_workers=count or config.rm_workers or default_workers(),
            initializer=worker.load,
            initargs=(names, paths, config.flag),
            context=self._context,
        )

    def ask(
        self, rule: str, groups: Sequence[Sequence[Sample]], seconds: float | None = None
    ) -> Answers:
        """Begin to score groups by a rule. `seconds`: to wait for each call, if not for as long as it
        takes."""
        if is_function(rule) and self.config.group_rm:
            jobs = [
                self._submit(worker.score_group, rule, [_light(s) for s in g]) for g in groups if g
            ]
            counts = [len(group) for group in groups if group]
        else:
            samples = [sample for group in groups for sample in group]
            jobs = [self._submit(worker.score, rule, *_arguments(rule, s)) for s in samples]
            counts = [1] * len(jobs)

        def answers() -> list[Numbers | Failure]:
            found = [self._result(job, seconds) for job in jobs]
            each = [
                one if isinstance(one, list) else [one] * count
                for one, count in zip(found, counts, strict=True)
            ]
            return [answer for answers in each for answer in answers]

        return answers

    def _submit(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return self._pool.schedule(call, args=arguments, timeout=self.config.rm_time_limit)

    def _result(self, job: Any, seconds: float | None) -> Any:
        """What the worker says: a Failure, what a sample was given, or a list of either."""
        try:
            return job.result(seconds)
        except FutureTimeout:
            limit = f"--rm-time-limit={self.config.rm_time_limit:g} seconds"
            if job.done():
                return Failure(reason=f"gave no result within {limit}", is_late=True)
            return Failure(reason=f"was not imported after {seconds} seconds")
        except BrokenProcessPool:
            return Failure(reason="ends the process that imports it")
        except ProcessExpired as error:
            code = error.exitcode
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Failure(reason=f"ended its process ({how})")

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()
        self._context.drop_locks()


def default_workers() -> int:
    """As many as there are cores, within limits: scoring alternates with work that uses them all."""
    return min(max(len(os.sched_getaffinity(0)), FEWEST_WORKERS), MOST_WORKERS)


def _arguments(rule: str, sample: Sample) -> tuple[Any, ...]:
    return (_light(sample),) if is_function(rule) else (sample.response, sample.prompt.label)


def _light(sample: Sample) -> Sample:
    """Without megabytes that no rule looks at."""
    trajectory = replace(sample.trajectory, routed_experts=None, kept_tokens=[], entropy=[])
    return replace(sample, trajectory=trajectory)
