"""Files that a command was asked to write."""

from __future__ import annotations

from pathlib import Path

from onpolicy import files
from onpolicy.errors import ConfigError


def write_output(flag: str, path: str, text: str) -> None:
    """Write the file, whole or not at all. Raises ConfigError if it cannot be written."""
    try:
        files.write(Path(path), text)
    except OSError as error:
        raise ConfigError(
            f"{flag}={path}: cannot be written ({error.strerror}). Give another path."
        ) from error
