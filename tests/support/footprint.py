"""What a run makes outside its own directory, recorded while it runs: processes and files."""

import threading
import time
from pathlib import Path

import psutil

from tests.support.processes import is_gone

SHARED_MEMORY = "/dev/shm/"


class Footprint:
    """Watches a process and all below it. Files in `temporary`, its TMPDIR, are its own."""

    def __init__(self, pid, temporary):
        self.temporary = temporary
        self.processes = {}
        self.shared_memory = set()
        self._top = psutil.Process(pid)
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self):
        while not self._ended.wait(0.25):
            self._look()

    def _look(self):
        try:
            found = [self._top, *self._top.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        self.processes |= {process.pid: process for process in found}
        for pid in self.processes:
            self.shared_memory |= mapped_shared_memory(pid)

    def left(self, patience=0.0):
        """Names of what is still there: empty when a run has cleaned up after itself.

        The system may take a moment to end a process that was killed: `patience` is in seconds.
        """
        self._ended.set()
        self._watcher.join()
        deadline = time.monotonic() + patience
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _left(self):
        running = [p for p in self.processes.values() if not is_gone(p)]
        return [
            *filter(None, map(told, running)),
            *(file for file in sorted(self.shared_memory) if Path(file).exists()),
            *(file.name for file in sorted(self.temporary.iterdir())),
        ]


def told(process):
    """What a process is called; nothing if it has ended."""
    try:
        return f"process {process.pid} {process.name()} {' '.join(process.cmdline())[:80]}"
    except psutil.Error:
        return ""


def mapped_shared_memory(pid):
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    names = {line[line.index(SHARED_MEMORY) :] for line in lines if SHARED_MEMORY in line}
    return {name.removesuffix(" (deleted)") for name in names}
