"""Tool that runs a policy's Python programs, each in a sandbox of bubblewrap (`bwrap`).

A program sees Python's libraries read-only, a directory in memory to write to, two devices, and no
network, no other process, no /proc and no environment variable of ours. `_BEGIN` is the first code
in the sandbox: it limits its own process and becomes the program. A run is answered when every
process of the sandbox has ended.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import IO
from weakref import WeakKeyDictionary

from onpolicy.agents.tools.observation import Observation, counted
from onpolicy.errors import ConfigError

WORK = "/work"
"""The working directory, and the one place where a program may write."""

_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
_NOBODY = 65534
_USER = "1000"

_BEGIN = """
import os, resource, sys
for kind, most in {limits!r}.items():
    resource.setrlimit(kind, (most, most))
os.write({status}, b"ready")
os.close({status})
os.execv(sys.executable, [sys.executable, "-I", "-B", "-u", "main.py"])
"""


@dataclass(frozen=True)
class PythonTool:
    """A runner of programs. One object serves any number of episodes at once."""

    _: KW_ONLY
    time_limit: float = 10.0
    """Seconds of wall-clock time for the whole program."""

    memory: int = 512 << 20
    """Bytes of address space of a process."""

    num_processes: int = 8
    """Processes and threads at a time."""

    file_size: int = 16 << 20
    """Bytes of one file."""

    files_size: int = 64 << 20
    """Bytes of all files together, which lie in memory."""

    output: int = 16 << 10
    """Bytes of standard output and error together."""

    at_once: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Programs that run at a time; others wait, and their time limit starts later."""

    readable: tuple[str, ...] = ()
    """Further directories that a program may read, at the same paths; programs started by root run
    as nobody, and read only files that everyone may read."""

    python: str = sys.executable
    """The interpreter; for root one that everyone may read, such as /usr/bin/python3."""

    _of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    async def run(self, code: str) -> Observation:
        """Return the program's output, including its traceback, and what ended it as a fault:
        'time', 'output', 'died' (by a signal). Raises ConfigError if there is no sandbox."""
        async with self._slots():
            return counted("python", await self._run(code.encode()))

    def _slots(self) -> asyncio.Semaphore:
        """Return the semaphore of the running event loop."""
        return self._of_loops.setdefault(
            asyncio.get_running_loop(), asyncio.Semaphore(self.at_once)
        )

    async def _run(self, code: bytes) -> Observation:
        (begun, begin), (told, tell) = os.pipe(), os.pipe()
        with (
            tempfile.TemporaryFile() as program,
            os.fdopen(begun, "rb") as status,
            os.fdopen(told, "rb") as info,
        ):
            program.write(code)
            program.seek(0)
            given = (begin, tell, program.fileno())
            # Linux limits no processes of root's, so root's programs are nobody's.
            user = _NOBODY if os.getuid() == 0 else None
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command(*given),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=given,
                    env={},
                    start_new_session=True,
                    user=user,
                    group=user,
                    extra_groups=None if user is None else [],
                )
            finally:
                os.close(begin)
                os.close(tell)
            try:
                output, fault = await self._attend(process)
            finally:
                await _end(process, info)
            return self._observation(output, fault, process.returncode, status.read() == b"ready")

    def _command(self, status: int, info: int, program: int) -> list[str]:
        """Return the command that makes the sandbox.

        File descriptors: `status` is written to at the beginning, `info` by bubblewrap."""
        if (bwrap := shutil.which("bwrap")) is None:
            raise ConfigError(
                "PythonTool: bwrap is not installed, and a program runs in nothing less than its "
                "sandbox. Install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap)."
            )
        libraries = [path for path in _LIBRARIES if os.path.lexists(path)]
        python = os.path.realpath(self.python)
        prefix = os.path.dirname(os.path.dirname(python))
        return [
            *(bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
            *("--die-with-parent", "--new-session", "--uid", _USER, "--gid", _USER),
            *("--setenv", "HOME", WORK, "--setenv", "TMPDIR", WORK, "--setenv", "LANG", "C.UTF-8"),
            *_shown((*libraries, prefix, *self.readable)),
            *("--dev-bind", "/dev/null", "/dev/null", "--dev-bind", "/dev/urandom", "/dev/urandom"),
            *("--size", str(self.files_size), "--perms", "0700", "--tmpfs", WORK),
            *("--perms", "0600", "--file", str(program), f"{WORK}/main.py"),
            *("--remount-ro", "/", "--chdir", WORK, "--info-fd", str(info), "--"),
            *(python, "-I", "-S", "-B", "-c", _BEGIN.format(limits=self._limits(), status=status)),
        ]

    def _limits(self) -> dict[int, int]:
        return {
            resource.RLIMIT_AS: self.memory,
            resource.RLIMIT_CPU: math.ceil(self.time_limit) + 1,
            resource.RLIMIT_FSIZE: self.file_size,
            resource.RLIMIT_NPROC: self.num_processes
            + 1,  # bubblewrap's first process is beside it
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_SIGPENDING: 64,
        }

    async def _attend(self, process: asyncio.subprocess.Process) -> tuple[bytes, str | None]:
        """Return the output, and the limit that was exceeded, if any."""
        assert process.stdout is not None
        output = bytearray()
        try:
            async with asyncio.timeout(self.time_limit):
                while more := await process.stdout.read(1 << 16):
                    output += more
                    if len(output) > self.output:
                        return bytes(output[: self.output]), "output"
                await process.wait()
        except TimeoutError:
            return bytes(output), "time"
        return bytes(output), None

    def _observation(
        self, output: bytes, fault: str | None, code: int | None, began: bool
    ) -> Observation:
        text = output.decode(errors="replace")
        if not began and fault != "time":
            raise ConfigError(
                f"PythonTool: bwrap makes no sandbox on this host ({text.strip() or code}). Let users "
                "make namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone or "
                "kernel.apparmor_restrict_unprivileged_userns; in a container, --privileged), install "
                "bubblewrap 0.8 or newer, and, as root, give a Python that everyone may read "
                "(python='/usr/bin/python3')."
            )
        if fault == "time":
            return Observation(f"{text}\n[ended: longer than {self.time_limit:g} seconds]", fault)
        if fault == "output":
            return Observation(f"{text}\n[ended: more than {self.output} bytes of output]", fault)
        if code is not None and code - 128 in signal.valid_signals():
            return Observation(f"{text}\n[ended by {signal.Signals(code - 128).name}]", "died")
        return Observation(text)


def _shown(paths: Iterable[str]) -> list[str]:
    """Return arguments that make links visible as links, and directories read-only."""
    arguments = []
    for path in paths:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        else:
            arguments += ["--ro-bind", path, path]
    return arguments


async def _end(process: asyncio.subprocess.Process, info: IO[bytes]) -> None:
    """End the sandbox, and wait until all of its processes are gone: with bubblewrap Linux ends the
    first process in it, and with that all others."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        # asyncio waits for the end of the output too, which comes only to those who read it.
        await asyncio.shield(process.communicate())
    told = await asyncio.to_thread(info.read)  # bubblewrap has ended, so it says no more
    with suppress(ValueError, ProcessLookupError):
        first = os.pidfd_open(json.loads(told)["child-pid"])
        try:
            await asyncio.to_thread(select.select, [first], [], [])
        finally:
            os.close(first)
