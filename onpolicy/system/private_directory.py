"""One name for everything a process makes outside its memory, so that others can remove it.

A process that is killed removes nothing. So its temporary files lie in a directory of its own, and what
it makes in /dev/shm has names that the directory records. The directory is locked as long as its owner,
or a process that the owner forked, lives; what no lock protects any more is removed by the next owner
that begins or ends: when a run is killed, by the guards of its servers.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Self

PREFIX = "onpolicy-"
SHARED_MEMORY = Path("/dev/shm")
SOCKETS = Path("/proc/net/unix")
LOCK = ".onpolicy-lock"

MAX_SOCKET_PATH = 107
"""Longest address of a Unix socket on Linux, in bytes (sys/un.h)."""


class PrivateDirectory:
    """A new directory under the temporary one; a context that removes it at the end."""

    def __init__(self, shared_memory: Sequence[str] = ()):
        """`shared_memory`: patterns of our files in /dev/shm; `NAME` becomes the directory's name."""
        sweep()
        # Locked and complete before it has a name that a sweep looks for.
        hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
        self.path = hidden.with_name(hidden.name[1:])
        self._owner = os.getpid()
        self._lock = _take_lock(hidden, os.O_RDWR | os.O_CREAT)
        for pattern in shared_memory:
            self._record(pattern.replace("NAME", self.path.name))
        hidden.rename(self.path)

    def fits_socket(self, name: str) -> bool:
        """Whether a socket can have this name, or one of the same length, in the directory."""
        return len(os.fsencode(self.path / name)) <= MAX_SOCKET_PATH

    def record_socket(self, socket: Path) -> None:
        """Have the socket's own directory removed too, unless a process that listens there does that."""
        self._record(str(socket))

    def _record(self, line: str) -> None:
        os.write(self._lock, f"{line}\n".encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the directory and the shared memory, and those whose owners were killed meanwhile.

        A forked process removes nothing.
        """
        if os.getpid() == self._owner:
            _remove(self.path)
            os.close(self._lock)
            sweep()


@functools.cache
def of_this_process() -> PrivateDirectory:
    """This process's directory until it exits; its semaphores and what torch shares go with it."""
    directory = PrivateDirectory(("sem.NAME*", f"torch_{os.getpid()}_*"))
    atexit.register(directory.remove)
    name_semaphores_after(directory.path.name)
    _start_tracker_without_words()
    return directory


def _start_tracker_without_words() -> None:
    """Start CPython's process that knows of semaphores so that it writes nowhere: of those of a
    process that was killed it says that they leaked, and that they are not there, once the
    directory's guard has removed them."""
    nowhere, standard_error = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    os.dup2(nowhere, 2)
    try:
        resource_tracker.ensure_running()
    finally:
        os.dup2(standard_error, 2)
        os.close(standard_error)
        os.close(nowhere)


def name_semaphores_after(directory: str) -> None:
    """Let the semaphores that this process and its children make from now on begin with a directory's
    name: in /dev/shm they match `sem.NAME*`."""
    # CPython's own record of it (multiprocessing/process.py), handed on to child processes.
    multiprocessing.current_process()._config["semprefix"] = f"/{directory}"  # type: ignore[attr-defined]


def sweep() -> None:
    """Remove the directories whose owners were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # in use, or none of ours
            if directory.lstat().st_uid == os.geteuid():
                lock = _take_lock(directory, os.O_RDWR)
                _remove(directory)
                os.close(lock)


def _take_lock(directory: Path, flags: int) -> int:
    lock = os.open(directory / LOCK, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove(directory: Path) -> None:
    """Remove a directory and what it records; those inside it, of processes that had it for their
    temporary one, go with their own."""
    for lock in [*directory.glob(f"**/{PREFIX}*/{LOCK}"), directory / LOCK]:
        with suppress(FileNotFoundError):  # of one whose owner removes it just now
            _remove_recorded(lock.read_text().splitlines())
    shutil.rmtree(directory, ignore_errors=True)


def _remove_recorded(lines: Sequence[str]) -> None:
    for line in lines:
        if line.startswith("/"):
            _remove_unheard(Path(line))
            continue
        for file in SHARED_MEMORY.glob(line):
            file.unlink(missing_ok=True)


def _remove_unheard(socket: Path) -> None:
    if not any(line.endswith(f" {socket}") for line in SOCKETS.read_text().splitlines()):
        shutil.rmtree(socket.parent, ignore_errors=True)
