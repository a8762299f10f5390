"""Files that a kill, a crash or a full disk leaves as they were, or as they should be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OWNER_ALONE, GROUP_TOO = 0o700, 0o750
"""Modes of directories that their owner alone can enter, and that the group can read."""


def make_private(directory: Path) -> None:
    """Make a directory that its owner alone can enter, and its parents.

    One that is there stays as it is. Raises OSError.
    """
    directory.mkdir(mode=OWNER_ALONE, parents=True, exist_ok=True)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path to write to; what it holds at the end takes the place of `file`, durably.

    Raises OSError with `file` as it was. A link, a pipe or a device, which nothing may take the
    place of, is written to as it is.
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
    """Add a line and its end. Raises OSError with the file as it was."""
    data = line + b"\n"
    with file.open("ab", buffering=0) as end:
        size = os.fstat(end.fileno()).st_size
        try:
            while data:  # a disk that runs full takes a part, and then refuses the rest
                data = data[end.write(data) :]
        except OSError as error:
            end.truncate(size)
            error.filename = str(file)
            raise


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a directory, is on disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
