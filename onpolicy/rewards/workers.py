"""Worker processes for rules and functions, with a time limit that really ends each call."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from onpolicy.config.groups import RewardConfig
from onpolicy.config.groups.reward import is_function
from onpolicy.rewards import Answers, Failure, Numbers, worker
from onpolicy.rewards.worker_process import WALL_FACTOR, WorkerProcess
from onpolicy.types import Sample

logger = logging.getLogger(__name__)

FEWEST_WORKERS, MOST_WORKERS = 4, 32

START_SECONDS = 120.0
"""Seconds a worker may take to import the rules in a trial; ten times as long in a run, whose host
may be busy."""

STARTS = 3
"""Processes that may end in a row before one has imported the rules."""


class Workers:
    """A pool of processes that have imported the rules. Each belongs to a thread, which replaces it
    when it has ended, in a call or between two."""

    def __init__(
        self, config: RewardConfig, rules: Sequence[str], count: int = 0, *, is_trial: bool = False
    ):
        """Start no process yet. is_trial: whether the rules are tried before a run, without
        repeats."""
        self.config, self._is_trial = config, is_trial
        self._starts, self._start_seconds = STARTS, WALL_FACTOR * START_SECONDS
        if is_trial:
            self._starts, self._start_seconds = 1, START_SECONDS
        paths = [rule for rule in rules if is_function(rule)]
        names = [rule for rule in rules if not is_function(rule)]
        self._given = names, paths, config.flag, config.rm_time_limit
        self._threads = ThreadPoolExecutor(count or config.rm_workers or default_workers())
        self._own, self._processes = threading.local(), set[WorkerProcess]()
        self._unusable: Failure | None = None
        self._is_closed = False
        self._repeated: list[str] = []

    def ask(self, rule: str, groups: Sequence[Sequence[Sample]]) -> Answers:
        """Begin to score groups by a rule; the result waits for the answers."""
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
            found = [job.result() for job in jobs]
            each = [
                one if isinstance(one, list) else [one] * count
                for one, count in zip(found, counts, strict=True)
            ]
            return [answer for answers in each for answer in answers]

        return answers

    def take_repeated(self) -> list[str]:
        """Return why calls were repeated since the last time, one line each."""
        taken, self._repeated = self._repeated, []
        return taken

    def _submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._threads.submit(self._call, call, arguments)

    def _call(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return the worker's result: a Failure, a sample's numbers, or a list of either.

        A call that was late, or ended its process, is repeated once.
        """
        found = self._ask(call, arguments)
        if isinstance(found, Failure) and found.may_pass and not self._is_trial:
            self._repeated.append(found.reason)
            found = self._ask(call, arguments)
        return found

    def _ask(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        process = self._own_process()
        if isinstance(process, Failure):
            return process
        found = process.ask(call, arguments)
        if isinstance(found, Failure) and found.may_pass:
            self._forget(process)
        return found

    def _own_process(self) -> WorkerProcess | Failure:
        """Return this thread's process, a new one if there is none; a Failure if none can be
        started."""
        process: WorkerProcess | None = getattr(self._own, "process", None)
        if process is not None:
            if process.is_alive:
                return process
            logger.warning(
                "a reward worker has ended between two calls (%s); another one takes its place",
                process.end(),
            )
            self._forget(process)
        failures = 0
        while self._unusable is None and not self._is_closed:
            process, failure = self._started()
            if failure is None:
                self._own.process = process
                return process
            self._forget(process)
            failures += 1
            if failure.is_late or failures == self._starts:
                self._unusable = failure
        return self._unusable or Failure(reason="was asked of workers that had ended")

    def _started(self) -> tuple[WorkerProcess, Failure | None]:
        """Return a new process, and a Failure if it cannot be used."""
        process = WorkerProcess(*self._given)
        self._processes.add(process)
        if self._is_closed:  # `close` may have looked before
            process.end()
        return process, process.wait_until_ready(self._start_seconds)

    def _forget(self, process: WorkerProcess) -> None:
        """Drop a process of this thread that has ended."""
        self._own.process = None
        self._processes.discard(process)

    def close(self) -> None:
        """End all processes and their calls."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._processes:
            self._processes.pop().end()
        self._threads.shutdown()


def default_workers() -> int:
    """Return the number of cores, within limits: scoring alternates with work that uses all cores."""
    return min(max(len(os.sched_getaffinity(0)), FEWEST_WORKERS), MOST_WORKERS)


def _arguments(rule: str, sample: Sample) -> tuple[Any, ...]:
    return (_light(sample),) if is_function(rule) else (sample.response, sample.prompt.label)


def _light(sample: Sample) -> Sample:
    """Return the sample without large arrays that no rule reads."""
    trajectory = replace(sample.trajectory, routed_experts=None, kept_tokens=[], entropy=[])
    return replace(sample, trajectory=trajectory)
