"""Processor seconds of a command and of all its descendants, also of one that leaves its parent:
all inherit an environment variable."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

TAG = "ONPOLICY_BENCHMARK_COMMAND"
INTERVAL = 0.25
"""Seconds between two samples; the time of a process after the last one before its end is lost."""

LEFT_OUT = ("MKL_CBWR", "OMP_WAIT_POLICY", "PYTHONDONTWRITEBYTECODE")
"""Variables of this process that the command does not get. With the last one Python would compile
PyTorch and the rest anew in every process, for three times the processor seconds of their imports."""

TICKS = os.sysconf("SC_CLK_TCK")


class Watch:
    """A command run in the environment of this process, without LEFT_OUT, and with some more
    variables."""

    def __init__(self, command: list[str], variables: dict[str, str], log: Path):
        self._tag = f"{os.getpid()}_{time.time()}"
        environment = {k: v for k, v in os.environ.items() if k not in LEFT_OUT}
        self._environment = {**environment, "PYTHONUNBUFFERED": "1", **variables, TAG: self._tag}
        self._command, self._log = command, log
        self._is_ours: dict[tuple[str, str], bool] = {}
        self._spent: dict[tuple[str, str], float] = {}
        self.samples: list[tuple[float, float]] = []
        self._has_ended = threading.Event()

    def __enter__(self) -> Self:
        self._load = [os.getloadavg()[0]]
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def lines(self) -> Iterator[tuple[float, str]]:
        """Yield the lines that it writes, each with its time: seconds since the epoch."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield time.time(), line

    def __exit__(self, *error: Any) -> None:
        if error[1] is not None:
            self._process.kill()
        code = self._process.wait()
        self._ended = time.time()
        self._has_ended.set()
        self._thread.join()
        self._load.append(os.getloadavg()[0])
        if code and error[1] is None:
            sys.exit(f"{' '.join(self._command)}: exit code {code}; see {self._log}")

    def record(self) -> dict[str, Any]:
        """Return the time of its end, (time, processor seconds until then), and the load before and
        after."""
        return {"ended": self._ended, "processor_seconds": self.samples, "load": self._load}

    def _look(self) -> None:
        while True:
            has_ended = self._has_ended.wait(INTERVAL)
            for directory in Path("/proc").iterdir():
                if directory.name.isdigit():
                    self._add(directory)
            self.samples.append((time.time(), sum(self._spent.values())))
            if has_ended:
                return

    def _add(self, directory: Path) -> None:
        try:
            numbers = (directory / "stat").read_text().rpartition(")")[2].split()
            user, system, started = numbers[11], numbers[12], numbers[19]
            key = directory.name, started
            if not self._is_ours.get(key):  # asked again: a process is another one after exec
                variables = (directory / "environ").read_bytes().split(b"\0")
                self._is_ours[key] = f"{TAG}={self._tag}".encode() in variables
        except OSError:  # it has ended, or is another user's
            return
        if self._is_ours[key]:
            self._spent[key] = (int(user) + int(system)) / TICKS
