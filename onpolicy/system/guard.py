"""A guard process over a server (SGLang or Ray), which ends it with its owner and removes its leftovers.

It is small and only waits, so it works when the server hangs. The owner holds its standard input, which
closes however the owner ends. As a child subreaper it adopts the server's orphans, so it knows when the
last process is gone. It passes on the server's output without the secrets.
"""

import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from onpolicy.errors import ConfigError
from onpolicy.system.private_directory import MAX_SOCKET_PATH, PrivateDirectory

_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_STANDARD_INPUT = 0


def let_end(guard: subprocess.Popen[Any]) -> None:
    """Have a guard end its server; the guard's end is still to be waited for."""
    if guard.stdin is not None:
        with suppress(BrokenPipeError):
            guard.stdin.close()
    guard.send_signal(signal.SIGCONT)  # a stopped guard would not see that its input has closed


def run(
    serve: Callable[[Path], None],
    *,
    secrets: Sequence[str] = (),
    shared_memory: Sequence[str] = (),
    when_told: Callable[[], Sequence[str]] | None = None,
) -> int:
    """Call `serve` in a process of its own, until it ends or standard input closes.

    `serve` gets a private directory, which is removed at the end, as are files in /dev/shm with names
    like `shared_memory` (`PrivateDirectory`). `secrets` are removed from its output.
    when_told: called once standard input has data or has closed. The server's output waits until then,
    for the secrets that it returns.
    Returns the exit code, 128 + n after signal n."""
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
            # Both are readable at their end. The server's sentinel would not be, since its children
            # inherit the other end when it forks them, and may outlive it.
            connection.wait(ends)
        finally:
            server.kill()  # does nothing if it has ended
            server.join()
            _end_orphans()
            if copier.ident is not None:
                copier.join()
    code = server.exitcode or 0
    return code if code >= 0 else 128 - code


def _serve(serve: Callable[[Path], None], directory: Path, log: int, guard: int) -> None:
    """Run the server in its process, which ends with the guard."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != guard:
        sys.exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    serve(directory)


def end_orphans_after_guard(directory: Path) -> None:
    """Let the server's own process replace its guard if that is killed, for servers whose child
    processes do not end with them. It kills all processes below it, removes the directory, and ends."""
    server = os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() == server:  # not in a forked process
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
    """Copy lines to standard output until all writers are gone; replace each secret by `...`."""
    # As it is, and escaped as in Python and JSON strings.
    forms = [{x, repr(x)[1:-1], json.dumps(x)[1:-1]} for x in secrets]
    hidden = [form.encode() for each in forms for form in each]
    for line in output:
        for secret in hidden:
            line = line.replace(secret, b"...")
        with suppress(OSError):  # a full disk must not stop the server
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def _end_orphans() -> None:
    """Kill all processes below this one, and wait until they are gone."""
    while orphans := psutil.Process().children(recursive=True):
        for orphan in orphans:
            with suppress(psutil.NoSuchProcess):
                orphan.kill()
        psutil.wait_procs(orphans, timeout=1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)
