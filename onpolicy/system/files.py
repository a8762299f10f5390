"""Files written so that a kill, a crash or a full disk does no harm, and users' files read.

A written file is old or new, never partial. Errors about a user's text file name it and the line.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onpolicy.errors import ConfigError

OWNER_ALONE, GROUP_TOO = 0o700, 0o750
"""The modes of directories that only the owner can enter, and that the group can read, too."""


def make_private(directory: Path) -> None:
    """Make a directory that only its owner can enter, and its parents. An existing one stays as it
    is. Raises OSError."""
    directory.mkdir(mode=OWNER_ALONE, parents=True, exist_ok=True)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path to write to, whose content replaces `file` durably at the end. Raises OSError,
    with `file` unchanged. A link, a pipe or a device is written to directly, and not replaced."""
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


def read_text(file: Path, name: str) -> str:
    """Return the text of a UTF-8 file, with or without a byte order mark. `name` stands for it in
    messages. Raises ConfigError if it cannot be read or is not UTF-8."""
    require_file(file, name)
    try:
        data = file.read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{name}: byte 0x{data[error.start]:02x} in line {line} is not UTF-8. Save it as UTF-8."
        ) from error
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror}).") from error


def require_file(file: Path, name: str) -> None:
    """Raise ConfigError unless `file` is a file."""
    try:
        file.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = getattr(error, "strerror", error)
        raise ConfigError(f"{name}: cannot be read ({reason}). Give the path of a file.") from error
    if not file.is_file():
        kind = "a directory" if file.is_dir() else "a device or a pipe"
        raise ConfigError(f"{name}: is {kind}, not a file. Give the path of a file.")


def parse_json(text: str) -> Any:
    """Return the value of standard JSON: no name twice in an object, no NaN. Raises ValueError."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_json_object(file: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ConfigError if there is none."""
    text = read_text(file, name)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{name}: not valid JSON ({error}). Mend it, or get it again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: holds a {type(value).__name__}, and must hold a JSON object.")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands twice in one object")
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
