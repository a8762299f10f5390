"""Lock of a run directory: a second run is refused, with the name of the first."""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from io import FileIO
from pathlib import Path

from onpolicy.errors import ConfigError
from onpolicy.system import files

logger = logging.getLogger(__name__)

FILE = ".lock"

_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)

_FORK_SECONDS = 0.5
"""Seconds for which a worker that a killed run was just forking may still hold the lock."""


@dataclass
class _Held:
    """A lock of this process, and how often it is held."""

    file: FileIO
    times: int = 0


_held: dict[tuple[int, int], _Held] = {}
"""The held locks, by the device and inode of the file."""


def _forget() -> None:
    """Close a forked process's copies of the files: it holds no lock, however long it lives."""
    for held in _held.values():
        held.file.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def locked(directory: Path, flag: str) -> Iterator[None]:
    """Create the directory if need be, for its owner alone, and lock it against other runs.

    The kernel releases the lock however the process ends. It is a flock, which belongs to the file as
    opened here: a record lock would be lost when this process closes the file once more. (Linux's NFS
    makes it a record lock between hosts.) A process may lock a directory several times. Raises
    ConfigError if nothing can be written there, or if another run holds the lock, with its name."""
    try:
        files.make_private(directory)
        file = FileIO(directory / FILE, "a+")
    except OSError as error:
        raise _unwritable(directory, flag, error) from error
    status = os.fstat(file.fileno())
    name = status.st_dev, status.st_ino
    if name in _held:
        file.close()
    else:
        try:
            _lock(file, directory, flag)
            _sign(file, directory, flag)
        except ConfigError:
            file.close()
            raise
        _held[name] = _Held(file)
    held = _held[name]
    held.times += 1
    try:
        yield
    finally:
        held.times -= 1
        if not held.times:
            _held.pop(name, None)
            held.file.close()


def _unwritable(directory: Path, flag: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{flag}={directory}: cannot be written ({error.strerror}). Choose another directory, or make "
        "room in this one."
    )


def _lock(file: FileIO, directory: Path, flag: str) -> None:
    deadline = time.monotonic() + _FORK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _HELD_BY_ANOTHER:
                logger.warning(
                    "%s=%s: cannot be locked (%s); see to it that no other run writes there",
                    flag, directory, error.strerror,
                )  # fmt: skip
                return
            if time.monotonic() > deadline:
                file.seek(0)
                raise ConfigError(
                    f"{flag}={directory}: {_owner(file.read())} is writing there. Two runs in one "
                    "directory would destroy each other's files. Wait for it, end it, or choose "
                    "another directory."
                ) from error
        time.sleep(_FORK_SECONDS / 10)


def _sign(file: FileIO, directory: Path, flag: str) -> None:
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
    try:
        file.truncate(0)
        file.write(json.dumps(owner).encode() + b"\n")
        os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable(directory, flag, error) from error


def _owner(text: bytes) -> str:
    try:
        owner = json.loads(text)
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']},"
    except (ValueError, KeyError, TypeError):
        return "another process"
