"""File operations that survive a kill, a crash or a full disk: a file is old or new, never partial."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OWNER_ALONE, GROUP_TOO = 0o700, 0o750
"""The modes of directories that only the owner can enter, and that the group can read, too."""


def make_private(directory: Path) -> None:
    """Make a directory that only its owner can enter, and its parents.

    An existing one stays as it is. Raises OSError.
    """
    directory.mkdir(mode=OWNER_ALONE, parents=True, exist_ok=True)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path to write to, whose content replaces `file` durably at the end.

    Raises OSError, with `file` unchanged. A link, a pipe or a device is written to directly, since it
    must not be replaced.
    """
    if file.is_symlink() or (file.exists() and not file.is_file()):
        yield file
        return
    partial = file.with_name(f".partial_{file.name}")
    try:
        yield partial
        sync(partial)
        partial.replace(file)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(file)
        raise
    sync(file.parent)


def write(file: Path, content: str | bytes) -> None:
    """Write a whole file, as `replacing` does."""
    with replacing(file) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def append(file: Path, line: bytes) -> None:
    """Append a line with its end. Raises OSError, with the file unchanged."""
    data = line + b"\n"
    with file.open("ab", buffering=0) as end:
        size = os.fstat(end.fileno()).st_size
        try:
            while data:  # a disk that fills up accepts a part, and then refuses the rest
                data = data[end.write(data) :]
        except OSError as error:
            end.truncate(size)
            error.filename = str(file)
            raise


def sync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
