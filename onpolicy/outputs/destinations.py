"""Destinations of results: tested before the work, and written whole."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from onpolicy.errors import ConfigError
from onpolicy.system import files

_TRIED_BYTES = 4096
"""Bytes written to test a place: a file system's block."""


def require_directory(flag: str, path: str) -> None:
    """Raise ConfigError if no file could be written into the directory that `flag` names."""
    with tried_directory(flag, path):
        pass


@contextmanager
def tried_directory(flag: str, path: str) -> Iterator[None]:
    """Write a file into the directory that `flag` names, and remove it; on exit also remove the
    directories created for it. Raises ConfigError if that cannot be done."""
    directory = Path(path).absolute()
    made = [place for place in (directory, *directory.parents) if not place.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory) as file:
            file.write(bytes(_TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        _remove(made)
        raise _refusal(flag, path, error) from error
    try:
        yield
    finally:
        _remove(made)


def _remove(made: Sequence[Path]) -> None:
    for place in made:
        with suppress(OSError):  # not made, or others write there meanwhile
            place.rmdir()


def require_writable(flag: str, path: str) -> None:
    """Raise ConfigError if the file that `flag` names cannot be written; leave the file unchanged."""
    file = Path(path)
    existed = file.exists()
    try:
        with file.open("ab"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise _refusal(flag, path, error) from error


def write_output(flag: str, path: str, text: str) -> None:
    """Write the file, whole or not at all. Raises ConfigError if it cannot be written."""
    try:
        files.write(Path(path), text)
    except OSError as error:
        raise _refusal(flag, path, error) from error


def _refusal(flag: str, path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{flag}={path}: cannot be written ({error.strerror}). Give a path that can be."
    )
