"""One name for all that a server makes outside its memory, so that its owner can remove it.

SGLang ends its processes with SIGKILL, which skips every clean-up in Python. Sockets and other files lie
in a directory of the server's own (TMPDIR); semaphores and shared memory, which must lie in /dev/shm,
begin with that directory's name (see shared_names.py). The directory is locked as long as its owner
or the server lives. One without a lock, whose owner was killed, the next owner removes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DIRECTORY_VARIABLE = "ONPOLICY_ENGINE_DIRECTORY"
"""Carries the directory into all processes of a server."""

PREFIX = "onpolicy-engine-"
SHARED_MEMORY = Path("/dev/shm")
LOCK = "lock"


@contextmanager
def private_directory() -> Iterator[Path]:
    """A new directory, removed at the end; its lock passes on to processes that are forked."""
    sweep()
    directory, lock = _claim()
    try:
        yield directory
    finally:
        _remove(directory)
        os.close(lock)


def sweep() -> None:
    """Remove the directories whose owners were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # locked, somebody else's, or none of ours
            lock = _take_lock(directory, os.O_RDWR)
            _remove(directory)
            os.close(lock)


def _claim() -> tuple[Path, int]:
    # Locked before it has a name that a sweep looks for.
    hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
    lock = _take_lock(hidden, os.O_RDWR | os.O_CREAT)
    return hidden.rename(hidden.with_name(hidden.name[1:])), lock


def _take_lock(directory: Path, flags: int) -> int:
    lock = os.open(directory / LOCK, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove(directory: Path) -> None:
    for pattern in (f"{directory.name}*", f"sem.{directory.name}*"):
        for file in SHARED_MEMORY.glob(pattern):
            file.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
