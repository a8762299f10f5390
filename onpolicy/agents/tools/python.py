"""Python programs that a policy writes, each in a process that can hurt nothing and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

from onpolicy.agents.tools.observation import Observation, counted
from onpolicy.errors import ConfigError
from onpolicy.system import private_directory

Isolation = Literal["namespaces", "rlimits"]

_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
_END_SECONDS = 10.0
"""How long Linux may take to end what was killed."""

_START = (
    "import sys; sys.path.insert(0, {root!r});"
    "from onpolicy.agents.tools.jail.start import main; main()"
)


@dataclass(frozen=True)
class PythonTool:
    """Runs programs. One object serves any number of episodes at once.

    `isolation` is what is required, and nothing less is ever used: with "namespaces" a program sees no
    file but Python's own, no other process and no network. "rlimits" is for hosts without namespaces and
    programs that you trust (`trusts_programs`): they may read and write what this process may, its
    memory too, and may signal it.
    """

    _: KW_ONLY
    isolation: Isolation = "namespaces"
    trusts_programs: bool = False
    """Whether programs are known to mean no harm, so that "rlimits" is enough for them."""

    time_limit: float = 10.0
    """Seconds of the whole, by the clock."""

    memory: int = 512 << 20
    """Bytes of addresses that a process may have."""

    num_processes: int = 8
    """Processes and threads at a time, with namespaces."""

    file_size: int = 16 << 20
    """Bytes of one file."""

    files_size: int = 64 << 20
    """Bytes of all files together, which lie in memory; with namespaces."""

    num_files: int = 256
    """Files and directories; with namespaces."""

    output: int = 16 << 10
    """Bytes of standard output and error together."""

    at_once: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Programs that run at a time; others wait, and their time does not begin."""

    readable: tuple[str, ...] = ()
    """Further directories that a program may read, at the same paths; with namespaces."""

    _of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.isolation not in ("namespaces", "rlimits"):
            raise ConfigError(
                f"isolation={self.isolation!r}: must be 'namespaces' or 'rlimits'. Give one of them."
            )
        if self.isolation == "rlimits" and not self.trusts_programs:
            raise ConfigError(
                "isolation='rlimits': a program can rewrite the memory of the process that runs it "
                "(/proc/PID/mem), rewards included, and signal it. Use isolation='namespaces', or, for "
                "programs that mean no harm, say trusts_programs=True."
            )

    async def run(self, code: str) -> Observation:
        """What the program printed, the trace of its error included; and what ended it, as a fault:
        'time', 'output', 'died' (by a signal). Raises ConfigError if it cannot be isolated so.
        """
        parent = private_directory.of_this_process().path
        async with self._slots():
            with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as directory:
                return counted("python", await self._run(code.encode(), directory))

    def _slots(self) -> asyncio.Semaphore:
        """Those of the event loop under way."""
        return self._of_loops.setdefault(
            asyncio.get_running_loop(), asyncio.Semaphore(self.at_once)
        )

    async def _run(self, code: bytes, directory: str) -> Observation:
        status, status_end = os.pipe()
        root = str(Path(__file__).parents[3])
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-B", "-c", _START.format(root=root)),
                *(str(status_end), str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(status_end,),
                env={},
                start_new_session=True,
            )
        finally:
            os.close(status_end)
        with os.fdopen(status, "rb") as said:
            try:
                output, fault = await self._attend(process, self._settings(directory) + code)
            finally:
                await _end(process)
            return self._observation(output, fault, said.read().decode().splitlines())

    def _settings(self, directory: str) -> bytes:
        python = Path(sys.base_prefix)
        libraries = [path for path in _LIBRARIES if os.path.lexists(path)]
        settings = {
            "isolation": self.isolation,
            "seconds": self.time_limit,
            "memory": self.memory,
            "file_size": self.file_size,
            "files_size": self.files_size,
            "num_files": self.num_files,
            "num_processes": self.num_processes,
            "directory": directory,
            "readable": [*libraries, str(python), *self.readable],
            "python": os.path.realpath(sys.executable),
        }
        return json.dumps(settings).encode() + b"\n"

    async def _attend(
        self, process: asyncio.subprocess.Process, given: bytes
    ) -> tuple[bytes, str | None]:
        """Its output, and why it has to be ended, if it has."""
        assert process.stdin is not None and process.stdout is not None
        output = bytearray()
        try:
            async with asyncio.timeout(self.time_limit):
                process.stdin.write(given)
                with suppress(ConnectionError):  # it could not begin, and says why
                    await process.stdin.drain()
                process.stdin.close()
                while more := await process.stdout.read(1 << 16):
                    output += more
                    if len(output) > self.output:
                        return bytes(output[: self.output]), "output"
                await process.wait()
        except TimeoutError:
            return bytes(output), "time"
        return bytes(output), None

    def _observation(self, output: bytes, fault: str | None, said: list[str]) -> Observation:
        began = said[:1] == ["ready"]
        if not began and not (fault == "time" and not said):
            why = " ".join(said) or "its process died"
            raise ConfigError(
                f"isolation={self.isolation!r}: this host does not give it ({why}). "
                + _REMEDIES[self.isolation]
            )
        text = output.decode(errors="replace")
        code = int(said[1]) if len(said) > 1 else 1
        if fault == "time":
            return Observation(f"{text}\n[ended: longer than {self.time_limit:g} seconds]", fault)
        if fault == "output":
            return Observation(f"{text}\n[ended: more than {self.output} bytes of output]", fault)
        number = -code if code < 0 else code - 128
        if number in signal.valid_signals():
            name = signal.Signals(number).name
            return Observation(f"{text}\n[ended by {name}]", "died")
        return Observation(text)


_REMEDIES: dict[Isolation, str] = {
    "namespaces": "Let users make namespaces (Linux 5.12 or newer on x86-64; sysctl "
    "user.max_user_namespaces, kernel.unprivileged_userns_clone or "
    "kernel.apparmor_restrict_unprivileged_userns; in a container, --privileged), or ask for "
    "isolation='rlimits' with trusts_programs=True, for programs that mean no harm.",
    "rlimits": "It needs Linux on x86-64 with seccomp filters. Run it there.",
}


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the program and all that it began, and wait until they are gone."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _END_SECONDS)
    except (TimeoutError, asyncio.CancelledError) as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if isinstance(error, asyncio.CancelledError):
            raise
        await process.wait()
