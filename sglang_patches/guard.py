"""The process in front of a server: ends it with its owner, and removes what it leaves behind.

It is small and does nothing but wait, so it works when the server hangs. The owner holds its standard
input, which closes however the owner ends. Linux hands it the server's orphans (a child subreaper), so
it knows when the last process is gone; and it passes the server's output on, less the secrets.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import BinaryIO

import psutil

from onpolicy.errors import ConfigError
from onpolicy.system.private_directory import MAX_SOCKET_PATH, PrivateDirectory
from sglang_patches.shared_names import DIRECTORY_VARIABLE, PATTERNS

_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_STANDARD_INPUT = 0


def run(serve: Callable[[], None], secrets: Sequence[str]) -> int:
    """Call `serve` in a process of its own, until that ends or standard input closes.

    Returns its exit code, 128 + n after signal n. `secrets` are kept out of its output.
    """
    _prctl(_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with PrivateDirectory(PATTERNS) as directory:
        if not directory.fits_socket("tmp12345678"):
            raise ConfigError(
                f"TMPDIR={directory.path.parent}: sockets below it would have longer names than Linux "
                f"takes ({MAX_SOCKET_PATH} bytes). Set TMPDIR to a shorter path, such as /tmp."
            )
        output, log = os.pipe()
        arguments = (serve, directory.path, log, os.getpid())
        server = multiprocessing.get_context("fork").Process(target=_serve, args=arguments)
        copier = threading.Thread(target=_copy, args=(os.fdopen(output, "rb"), secrets))
        server.start()
        try:
            assert server.pid is not None
            os.close(log)
            copier.start()
            # Both are readable when they end. The server's sentinel would be only when its children,
            # which it forks and which inherit the other end, have ended too.
            connection.wait([os.pidfd_open(server.pid), _STANDARD_INPUT])
        finally:
            server.kill()  # no more than a signal to nobody if it has ended
            server.join()
            _end_orphans()
            copier.join()
    code = server.exitcode or 0
    return code if code >= 0 else 128 - code


def _serve(serve: Callable[[], None], directory: Path, log: int, guard: int) -> None:
    """The server's process: ends with the guard, and keeps its files in the directory."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != guard:
        sys.exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.environ["TMPDIR"] = os.environ[DIRECTORY_VARIABLE] = tempfile.tempdir = str(directory)
    serve()


def _copy(output: BinaryIO, secrets: Sequence[str]) -> None:
    """Copy lines to standard output until all writers are gone; each secret becomes `...`."""
    hidden = [form.encode() for secret in secrets for form in _forms(secret)]
    for line in output:
        for secret in hidden:
            line = line.replace(secret, b"...")
        with suppress(OSError):  # a full disk must not stop the server
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def _forms(secret: str) -> set[str]:
    """How a secret looks in output: as it is, and inside Python's and JSON's quotation marks."""
    return {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1]}


def _end_orphans() -> None:
    """Kill all processes below this one, and wait until they are gone."""
    while orphans := psutil.Process().children(recursive=True):
        for orphan in orphans:
            with suppress(psutil.NoSuchProcess):
                orphan.kill()
        psutil.wait_procs(orphans, timeout=1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)
