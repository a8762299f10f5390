"""A directory for everything that a process makes outside its memory, so that others can remove it.

A killed process removes nothing. So its temporary files are in a directory of its own, which also
records the names of its files in /dev/shm. The directory is locked while its owner, or a process that
the owner forked, lives. The next owner that starts or ends removes all directories without a lock; after
a kill of a run, these are the guards of its servers.
"""

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
"""The longest address of a Unix socket on Linux, in bytes (sys/un.h)."""


class PrivateDirectory:
    """A new directory below the temporary one, and a context that removes it at the end."""

    def __init__(self, shared_memory: Sequence[str] = ()):
        """Make and lock it. shared_memory: patterns of its files in /dev/shm (`NAME`: its name)."""
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
        """Return whether a socket with this name, or another one as long, fits in the directory."""
        return len(os.fsencode(self.path / name)) <= MAX_SOCKET_PATH

    def record_socket(self, socket: Path) -> None:
        """Record a socket, whose own directory is removed, too, unless a process still listens there."""
        self._record(str(socket))

    def _record(self, line: str) -> None:
        os.write(self._lock, f"{line}\n".encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the directory and its shared memory, and the directories of owners that were
        killed meanwhile. Do nothing in a forked process."""
        if os.getpid() == self._owner:
            _remove(self.path)
            os.close(self._lock)
            sweep()


@functools.cache
def of_this_process() -> PrivateDirectory:
    """Return this process's directory, which is removed at its exit, with its shared memory."""
    directory = PrivateDirectory(("sem.NAME*", f"torch_{os.getpid()}_*"))
    atexit.register(directory.remove)
    name_semaphores_after(directory.path.name)
    _start_tracker_without_words()
    return directory


def _start_tracker_without_words() -> None:
    """Start CPython's resource tracker without an output. After a kill it would warn about leaked
    semaphores, and about missing ones that the directory's guard has removed."""
    nowhere, standard_error = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    os.dup2(nowhere, 2)
    try:
        resource_tracker.ensure_running()
    finally:
        os.dup2(standard_error, 2)
        os.close(standard_error)
        os.close(nowhere)


def name_semaphores_after(directory: str) -> None:
    """Let the names of future semaphores of this process and its children begin with a directory's name,
    so that they match `sem.NAME*` in /dev/shm."""
    # CPython's own prefix (multiprocessing/process.py), inherited by child processes.
    multiprocessing.current_process()._config["semprefix"] = f"/{directory}"  # type: ignore[attr-defined]


def hold_listeners() -> None:
    """Put the sockets on which multiprocessing listens, such as a fork server's, into this process's
    directory, unless its path is too long for them."""
    directory = of_this_process()
    if directory.fits_socket("listener-12345678"):
        # CPython's own directory (multiprocessing/util.py, get_temp_dir), which a kill would leave.
        multiprocessing.current_process()._config["tempdir"] = str(directory.path)  # type: ignore[attr-defined]


def sweep() -> None:
    """Remove the directories whose owners were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # in use, or not one of ours
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
    """Remove a directory and everything that it records; directories inside it, of processes that used
    it as their temporary one, are removed with their records."""
    for lock in [*directory.glob(f"**/{PREFIX}*/{LOCK}"), directory / LOCK]:
        with suppress(FileNotFoundError):  # its owner is removing it right now
            _remove_recorded(lock.read_text().splitlines())
    shutil.rmtree(directory, ignore_errors=True)


def _remove_recorded(lines: Sequence[str]) -> None:
    for line in lines:
        if not line.startswith("/"):
            for file in SHARED_MEMORY.glob(line):
                file.unlink(missing_ok=True)
        elif not any(each.endswith(f" {line}") for each in SOCKETS.read_text().splitlines()):
            shutil.rmtree(Path(line).parent, ignore_errors=True)
