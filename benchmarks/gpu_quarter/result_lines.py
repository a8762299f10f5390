"""Results as lines of JSON, which a process that is killed has written as far as it came."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def claim_output() -> int:
    """Return a descriptor of standard output for `write_line`; what libraries print goes to standard
    error from now on."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    return descriptor


def write_line(descriptor: int, line: Line) -> None:
    """Write a line in one call, so that those of several processes do not mix."""
    os.write(descriptor, (json.dumps(line) + "\n").encode())


def lines_of(text: str) -> list[Line]:
    """Return the results among the whole lines of `text`."""
    found = []
    for part in text.splitlines(keepends=True):
        if part.startswith("{") and part.endswith("}\n"):
            with suppress(ValueError):  # a library's dictionary, printed
                found.append(json.loads(part))
    return found


def read_lines(file: Path) -> list[Line]:
    """Return what a record holds; the last line may have been cut."""
    return lines_of(file.read_text()) if file.exists() else []
