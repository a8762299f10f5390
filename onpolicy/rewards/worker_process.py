"""Handle of one scoring process: start, call, and end it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from onpolicy.rewards import Failure, worker

WALL_FACTOR = 10.0
"""Seconds of wall-clock time that a call may take per second of processor time: a call that sleeps
or waits forever ends too, and a call that a busy host hardly lets run does not."""

_TABLE = threading.Lock()
"""A lock for starting and ending processes, since `multiprocessing` keeps one table of them."""


class WorkerProcess:
    """A process that imports some rules and then answers one call at a time.

    Its pipe is its own, so that a process that dies, hangs or is stopped blocks no other.
    """

    def __init__(self, names: Sequence[str], paths: Sequence[str], flag: str, seconds: float):
        """Start the process. seconds: processor time per call; the other arguments: see
        `worker.load`."""
        self._seconds, self._wall = seconds, WALL_FACTOR * seconds
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        self._link, theirs = context.Pipe()
        _limit_blocking(self._link.fileno(), self._wall)
        self._process = context.Process(
            target=worker.serve,
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
        """Return the result of a function of `rewards/worker.py`, or a Failure that may pass, after
        which the process has ended."""
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


def _limit_blocking(descriptor: int, seconds: float) -> None:
    """Have reads and writes of a socket raise BlockingIOError after some seconds: a stopped process
    reads no more than fits the socket's buffer."""
    span = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(descriptor)) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
