"""One run to a directory: the second is told who is there."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from io import FileIO
from pathlib import Path

from onpolicy.errors import ConfigError

logger = logging.getLogger(__name__)

FILE = ".lock"

_HELD_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)


@contextmanager
def locked(directory: Path, flag: str) -> Iterator[None]:
    """Make the directory if need be, and keep other runs out of it.

    The kernel gives the lock back however the process ends. It is a record lock, since flock's
    would live on in a forked worker. Raises ConfigError if nothing can be written there, or naming
    the run that is there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = FileIO(directory / FILE, "a+")
    except OSError as error:
        raise _unwritable(directory, flag, error) from error
    with file:
        _lock(file, directory, flag)
        _sign(file, directory, flag)
        yield


def _unwritable(directory: Path, flag: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{flag}={directory}: cannot be written ({error.strerror}). Choose another directory, or make "
        "room in this one."
    )


def _lock(file: FileIO, directory: Path, flag: str) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            file.seek(0)
            raise ConfigError(
                f"{flag}={directory}: {_owner(file.read())} is writing there. Two runs in one "
                "directory would destroy each other's files. Wait for it, end it, or choose "
                "another directory."
            ) from error
        logger.warning(
            "%s=%s: cannot be locked (%s); see to it that no other run writes there",
            flag, directory, error.strerror,
        )  # fmt: skip


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
