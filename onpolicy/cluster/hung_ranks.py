"""The detection of hung trainer ranks by the processor time that they use.

A call of the ranks may take hours, so there is no time limit for it. But a rank that computes, copies,
reads or drives a GPU uses a processor, while a stopped one, or one that waits in a gloo collective, uses
next to none; if all ranks are such, none will end the wait. (Ranks that wait in an NCCL collective use a
processor; NCCL's own time limit ends them.)
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import psutil

from onpolicy.cluster.hosts import Host
from onpolicy.cluster.session import told_by
from onpolicy.errors import ConfigError, TrainerLostError

logger = logging.getLogger(__name__)

LEAST_SHARE = 0.01
"""The least share of a processor that a working rank uses; Ray's threads in an idle one took 0.001 to
0.004, on an Intel Xeon."""

LOOKS = 4
"""The number of looks within the time after which ranks count as hung."""

SAYS_AFTER = 60.0
"""The seconds between two log lines about waiting for ranks."""

Look = tuple[float, str]
"""The seconds of processor time that a process has used, and its state in Linux's words."""


class HungRanks:
    """The observations of the ranks' processes during a call."""

    def __init__(
        self,
        ranks: Sequence[tuple[Host, int]],
        seconds: float,
        told: Callable[..., dict[Host, Any]] = told_by,
    ):
        """Observe ranks (host, process id), which count as hung after `seconds` without work."""
        self._ranks, self._seconds, self._told = ranks, seconds, told
        self._next_look = time.monotonic() + seconds / LOOKS
        self._before: list[Look] = []
        self._worked = 0.0

    def require_work(self) -> None:
        """Raise TrainerLostError, and kill the ranks, if no rank has worked for too long."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + self._seconds / LOOKS
        try:
            looks = self._look()
        except ConfigError as error:  # a host is being lost, which the calls of its ranks report
            logger.debug("%s", error)
            return
        if not self._before or self._has_worked(looks, now - self._worked):
            self._before, self._worked = looks, now
        elif now - self._worked >= self._seconds:
            self._kill()
            raise TrainerLostError(self._words(looks, now - self._worked))
        else:
            logger.warning(
                "no rank of the trainer has computed for %.0f s; they count as hung after %g s "
                "(--rank-timeout)", now - self._worked, self._seconds,
            )  # fmt: skip

    def _has_worked(self, looks: Sequence[Look], seconds: float) -> bool:
        used = [now[0] - before[0] for now, before in zip(looks, self._before, strict=True)]
        return max(used) > LEAST_SHARE * seconds

    def _look(self) -> list[Look]:
        """Return a look at each rank, on all hosts."""
        found = self._on_each_host(look_at, "what its ranks of the trainer do")
        return [found[host][pid] for host, pid in self._ranks]

    def _kill(self) -> None:
        with suppress(ConfigError):
            self._on_each_host(kill, "that its ranks of the trainer are gone")

    def _on_each_host(self, ask: Callable[[list[int]], Any], what: str) -> dict[Host, Any]:
        pids = defaultdict(list)
        for host, pid in self._ranks:
            pids[host].append(pid)
        here: dict[Host, Any] = {}
        for host, own in pids.items():
            here |= self._told([host], partial(ask, own), what)
        return here

    def _words(self, looks: Sequence[Look], seconds: float) -> str:
        states = ", ".join(f"rank {rank} ({state})" for rank, (_, state) in enumerate(looks))
        return (
            f"--rank-timeout={self._seconds:g}: no rank of the trainer has computed for {seconds:.0f} "
            f"s: {states}. One that is stopped, or waits for a disk or for another rank, holds up all. "
            "They were ended. Resume with --load, or let the run do so (--max-rank-restarts); give more "
            "seconds if they were waiting for something slow."
        )


def look_at(pids: Sequence[int]) -> dict[int, Look]:
    """Return processor time and state of processes on this host; (0.0, "gone") for ended ones."""
    found: dict[int, Look] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            times = process.cpu_times()
            found[pid] = times.user + times.system, process.status()
        except psutil.Error:
            found[pid] = 0.0, "gone"
    return found


def kill(pids: Sequence[int]) -> None:
    """Kill processes of this host."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


class NotStarted:
    """The wait for ranks whose processes have not answered yet."""

    def __init__(self, seconds: float, logs: str):
        """Start the wait. seconds: the limit on it; logs: the place of the ranks' log files."""
        self._seconds, self._logs, self._began = seconds, logs, time.monotonic()
        self._says_at = self._began + SAYS_AFTER

    def require_work(self) -> None:
        """Raise TrainerLostError after too long a wait; log from time to time."""
        now = time.monotonic()
        if now - self._began >= self._seconds:
            raise TrainerLostError(
                f"--rollout-start-timeout={self._seconds:g}: the processes of the trainer's ranks have "
                f"not started in that time. Their logs may say why: {self._logs}. A host that is busy "
                "or short of memory is the common cause: try again, or give more time."
            )
        if now >= self._says_at:
            self._says_at = now + SAYS_AFTER
            logger.info("waiting for the trainer's ranks to start, for %.0f s", now - self._began)
