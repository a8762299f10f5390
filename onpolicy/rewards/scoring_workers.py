"""Worker processes for rules and functions, with a time limit that really ends each call.

`Workers` is the pool, and `WorkerProcess` the handle of one process: to start, call and end it.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import multiprocessing.context
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from onpolicy.config.groups import RewardConfig
from onpolicy.config.groups.reward_flags import is_function
from onpolicy.rewards import Answers, Failure, Numbers, scoring_worker
from onpolicy.system import private_directory
from onpolicy.types import Sample

logger = logging.getLogger(__name__)

FEWEST_WORKERS, MOST_WORKERS = 4, 32

CALLS_EACH = 4
"""Calls of a built-in rule among which a worker's share of the samples is split: one call takes 0.15
milliseconds, as much as most rules."""

START_SECONDS = 120.0
"""Seconds to import the rules in a trial; ten times as long in a run, whose host may be busy."""

STARTS = 3
"""Processes that may end in a row before one has imported the rules."""

WALL_FACTOR = 10.0
"""Seconds of wall-clock time that a call may take per second of processor time: a call that sleeps
or waits forever ends too, and a call that a busy host hardly lets run does not."""


class Workers:
    """A pool of processes that have imported the rules. Each belongs to a thread, which replaces it
    when it has ended, in a call or between two."""

    def __init__(
        self, config: RewardConfig, rules: Sequence[str], count: int = 0, *, is_trial: bool = False
    ):
        """Start no process yet. is_trial: whether rules are tried before a run, without repeats."""
        self.config, self._is_trial = config, is_trial
        self._starts, self._start_seconds = STARTS, WALL_FACTOR * START_SECONDS
        if is_trial:
            self._starts, self._start_seconds = 1, START_SECONDS
        paths = [rule for rule in rules if is_function(rule)]
        names = [rule for rule in rules if not is_function(rule)]
        self._given = names, paths, config.flag, config.rm_time_limit
        self._count = count or config.rm_workers or default_workers()
        self._threads = ThreadPoolExecutor(self._count)
        self._own, self._processes = threading.local(), set[WorkerProcess]()
        self._unusable: Failure | None = None
        self._is_closed = False
        self._repeated: list[str] = []

    def ask(self, rule: str, groups: Sequence[Sequence[Sample]]) -> Answers:
        """Begin to score groups by a rule; the result waits for the answers."""
        if is_function(rule) and self.config.group_rm:
            jobs = [
                self._threads.submit(
                    self._call, scoring_worker.score_group, (rule, [*map(_light, group)])
                )
                for group in filter(None, groups)
            ]
            counts = [len(group) for group in groups if group]
        else:
            samples = [sample for group in groups for sample in group]
            size = 1 if is_function(rule) else max(1, len(samples) // (CALLS_EACH * self._count))
            parts = [samples[i : i + size] for i in range(0, len(samples), size)]
            jobs = [self._threads.submit(self._call_each, rule, part) for part in parts]
            counts = [len(part) for part in parts]

        def answers() -> list[Numbers | Failure]:
            found = [job.result() for job in jobs]
            each = [
                one if isinstance(one, list) else [one] * count
                for one, count in zip(found, counts, strict=True)
            ]
            return [answer for answers in each for answer in answers]

        return answers

    def start(self) -> None:
        """Start the processes before they are needed; return at once."""
        for _ in range(self._count):
            self._threads.submit(self._own_process)

    def take_repeated(self) -> list[str]:
        """Return why calls were repeated since the last time, one line each."""
        taken, self._repeated = self._repeated, []
        return taken

    def _call_each(self, rule: str, samples: Sequence[Sample]) -> list[Numbers | Failure]:
        """Return a rule's results for samples, in their order. A built-in rule gets them in one call,
        and each alone if they need more time together than one of them may."""
        given = [_arguments(rule, sample) for sample in samples]
        process = self._own_process() if len(given) > 1 else None
        if isinstance(process, WorkerProcess):
            found: list[Numbers | Failure] | Failure = process.ask(
                scoring_worker.score_each, (rule, given)
            )
            if not isinstance(found, Failure):
                return found
            self._repeated.append(found.reason)
            self._forget(process)
        return [self._call(scoring_worker.score, (rule, *arguments)) for arguments in given]

    def _call(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return the worker's result: a Failure, a sample's numbers, or a list of either. A call
        that was late, or ended its process, is repeated once."""
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
        """Return this thread's process, a new one if need be; a Failure if none can be started."""
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
    trajectory = replace(
        sample.trajectory, routed_experts=None, kept_tokens=[], row_digests=[], likeliest=[]
    )
    return replace(sample, trajectory=trajectory)


_TABLE = threading.Lock()
"""A lock for starting and ending processes, since `multiprocessing` keeps one table of them."""


class WorkerProcess:
    """A process that imports some rules and then answers one call at a time. Its pipe is its own,
    so that a process that dies, hangs or is stopped blocks no other."""

    def __init__(self, names: Sequence[str], paths: Sequence[str], flag: str, seconds: float):
        """Start the process. seconds: processor time per call; the other arguments: see
        `scoring_worker.load`."""
        self._seconds, self._wall = seconds, WALL_FACTOR * seconds
        context = _forks()
        self._link, theirs = context.Pipe()
        _limit_blocking(self._link.fileno(), self._wall)
        self._process = context.Process(
            target=scoring_worker.serve,
            args=(theirs, names, paths, flag),
            name="rewards",
            daemon=True,  # so that a run that ends unawares does not wait for it
        )
        with _TABLE:
            self._process.start()
        theirs.close()

    def wait_until_ready(self, seconds: float) -> Failure | None:
        """Wait until the rules are imported; return a Failure if they are not."""
        try:
            if self._link.poll(seconds):
                self._link.recv()
                return None
            reason, is_late = f"was not imported after {seconds:g} seconds", True
            self.end()
        except (EOFError, OSError):
            reason, is_late = f"ends the process that imports it ({self.end()})", False
        return Failure(reason=reason, in_loading=True, is_late=is_late)

    @property
    def is_alive(self) -> bool:
        """Whether the process can take calls."""
        with _TABLE:
            return self._process.is_alive()

    def ask(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return the result of a function of `rewards/scoring_worker.py`, or a Failure that may
        pass, after which the process has ended."""
        limit = f"--rm-time-limit={self._seconds:g} seconds of processor time"
        try:
            self._link.send((self._seconds, function, arguments))
            if self._link.poll(self._wall):
                return self._link.recv()
            self.end()
            clock = f"nor within {self._wall:g} seconds by the clock"
            reason, is_late = f"gave no result within {limit}, {clock}", True
        except (EOFError, OSError):
            how = self.end()
            is_late = how == signal.SIGPROF.name
            reason = f"gave no result within {limit}" if is_late else f"ended its process ({how})"
        return Failure(reason=reason, is_late=is_late, may_pass=True)

    def end(self) -> str:
        """Kill the process, unless it has ended; return how it ended. Example: 'SIGSEGV'"""
        with _TABLE:
            self._process.kill()
            self._process.join()
            code = self._process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


@functools.cache
def _forks() -> multiprocessing.context.ForkServerContext:
    """Return the context of processes that are forked from one that has imported what they need; a fork
    of this process, which has threads, may hang."""
    private_directory.hold_listeners()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([scoring_worker.__name__])
    return context


def _limit_blocking(descriptor: int, seconds: float) -> None:
    """Have reads and writes of a socket raise BlockingIOError after some seconds: a stopped process
    reads no more than fits the socket's buffer."""
    span = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(descriptor)) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
