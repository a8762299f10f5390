"""A server process that imports SGLang before its flags are known.

The import takes as long as a run needs to check its inputs, so both are done at once. The first
server with the same environment takes the process over.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from onpolicy.system import guard

logger = logging.getLogger(__name__)

OURS = "ONPOLICY_"
"""The prefix of variables that nothing reads before the server starts."""

GUARDED = "ONPOLICY_GUARDED"
"""A variable that tells a server that we hold the other end of its standard input."""

_waiting: tuple[subprocess.Popen[bytes], dict[str, str]] | None = None


def command(*flags: str) -> list[str]:
    """Return the command of a server with these SGLang flags."""
    return [sys.executable, "-m", "sglang_patches.server_process", *flags]


@contextmanager
def begun(environment: Mapping[str, str]) -> Iterator[None]:
    """Import SGLang in this environment in the background, for a server started within the context."""
    global _waiting
    environment = {**environment, GUARDED: "1"}
    process = subprocess.Popen(
        command("--later"),
        # It ends when this pipe closes, so it cannot outlive us however we end.
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    _waiting = process, environment
    try:
        yield
    finally:
        if _waiting is not None:
            _end(process)
            _waiting = None


def take_over(
    environment: Mapping[str, str], orders: Mapping[str, Any]
) -> subprocess.Popen[bytes] | None:
    """Have the waiting process, if it began in this environment, serve; return it, else None."""
    global _waiting
    taken, _waiting = _waiting, None
    if taken is None:
        return None
    process, began = taken
    differs = {name for name in {*began, *environment} if began.get(name) != environment.get(name)}
    if process.poll() is None and all(name.startswith(OURS) for name in differs):
        variables = {name: environment[name] for name in differs if name in environment}
        line = json.dumps({**orders, "variables": variables}).encode() + b"\n"
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(line)
            process.stdin.flush()
            return process
    logger.debug("the server that waited began in another environment: %s", sorted(differs))
    _end(process)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    guard.let_end(process)
    process.wait()
