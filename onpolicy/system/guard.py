"""The process in front of a server, SGLang's or Ray's: ends it with its owner, removes what it leaves.

It is small and does nothing but wait, so it works when the server hangs. The owner holds its standard
input, which closes however the owner ends. Linux hands it the server's orphans (a child subreaper), so
it knows when the last process is gone; and it passes the server's output on, less the secrets.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import BinaryIO

import psutil

from onpolicy.errors import ConfigError
from onpolicy.system.private_directory import MAX_SOCKET_PATH, PrivateDirectory

_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_STANDARD_INPUT = 0


def run(
    serve: Callable[[Path], None],
    *,
    secrets: Sequence[str] = (),
    shared_memory: Sequence[str] = (),
    when_told: Callable[[], Sequence[str]] | None = None,
) -> int:
    """Call `serve` in a process of its own, until that ends or standard input closes.

    `serve` is given a private directory, which is removed in the end, as are files in /dev/shm with
    names like `shared_memory` (`PrivateDirectory`). `secrets` are kept out of its output.
    when_told: called when there is something to read from standard input, or that has closed; what the
    server says waits until then for the secrets that it returns.
    Returns its exit code, 128 + n after signal n.
    """
    _prctl(_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with PrivateDirectory(shared_memory) as directory:
        if not directory.fits_socket("tmp12345678"):
            raise ConfigError(
                f"TMPDIR={directory.path.parent}: sockets below it would have longer names than Linux "
                f"takes ({MAX_SOCKET_PATH} bytes). Set TMPDIR to a shorter path, such as /tmp."
            )
        output, log = os.pipe()
        arguments = (serve, directory.path, log, os.getpid())
        server = multiprocessing.get_context("fork").Process(target=_serve, args=arguments)
        hidden = [*secrets]
        copier = threading.Thread(target=_copy, args=(os.fdopen(output, "rb"), hidden))
        server.start()
        try:
            assert server.pid is not None
            os.close(log)
            ends = [os.pidfd_open(server.pid), _STANDARD_INPUT]
            if when_told is not None and _STANDARD_INPUT in connection.wait(ends):
                hidden += when_told()
            copier.start()
            # Both are readable when they end. The server's sentinel would be only when its children,
            # which it forks and which inherit the other end, have ended too.
            connection.wait(ends)
        finally:
            server.kill()  # no more than a signal to nobody if it has ended
            server.join()
            _end_orphans()
            if copier.ident is not None:
                copier.join()
    code = server.exitcode or 0
    return code if code >= 0 else 128 - code


def _serve(serve: Callable[[Path], None], directory: Path, log: int, guard: int) -> None:
    """The server's process: ends with the guard."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != guard:
        sys.exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    serve(directory)


def end_orphans_after_guard(directory: Path) -> None:
    """Let this process, the server's, take its guard's place if that is killed: it kills all below it,
    removes the directory, and ends. For servers whose own processes do not end with it."""
    server = os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() == server:  # no process that was forked
            _end_orphans()
            shutil.rmtree(directory, ignore_errors=True)
        os._exit(128 + number)

    guard = os.getppid()
    _prctl(_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, end)
    _prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != guard:
        end(signal.SIGTERM, None)


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
