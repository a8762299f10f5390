"""The reading of users' text files: errors name the file and the line, without a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onpolicy.errors import ConfigError


def read_text(file: Path, name: str) -> str:
    """Return the text of a UTF-8 file, with or without a byte order mark. `name` stands for it in
    messages.

    Raises ConfigError if it cannot be read or is not UTF-8.
    """
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
