"""Where results are written: tried before the work that leads to them, and written whole."""

from __future__ import annotations

from pathlib import Path

from onpolicy.errors import ConfigError
from onpolicy.system import files


def require_directory(flag: str, path: str) -> None:
    """Make the directory that `flag` names. Raises ConfigError if that cannot be done."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refusal(flag, path, error) from error


def require_writable(flag: str, path: str) -> None:
    """Raise ConfigError if the file that `flag` names could not be written; leaves it as it is."""
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
