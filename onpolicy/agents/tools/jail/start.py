"""Start a program in a jail, wait for it, and say how it ended.

Standard input brings a line of JSON (`Settings`), then the program. The status pipe takes a line before
the program begins, `ready` or why it cannot; and one in the end: its exit code, -n or 128 + n after
signal n. SIGTERM ends the program and all that it began, and then this process. The program ends with
this process, and this one with the thread that started it.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from onpolicy.agents.tools.jail import linux
from onpolicy.agents.tools.jail.root import build_root, map_users
from onpolicy.agents.tools.jail.system_calls import make_filter

PROGRAM = "main.py"
USER = 1000
"""That the program has in namespaces of its own."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the program may have."""

    isolation: str
    seconds: float
    memory: int
    file_size: int
    files_size: int
    num_files: int
    num_processes: int
    directory: str
    readable: list[str]
    python: str


def main() -> None:
    """Run it: the whole life of the process in front of the program."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    status, starter = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(status, False)
    if os.getppid() != starter:
        sys.exit(1)
    settings = Settings(**json.loads(sys.stdin.buffer.readline()))
    program = sys.stdin.buffer.read()
    try:
        child = _begin(settings, program, status)
    except OSError as error:
        os.write(status, f"{error}\n".encode())
        sys.exit(1)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    _, how = os.waitpid(child, 0)
    os.write(status, f"{os.waitstatus_to_exitcode(how)}\n".encode())


def _begin(settings: Settings, program: bytes, status: int) -> int:
    """The process ID of what is waited for: of the program, or of the first process beside it."""
    parent = os.getpid()
    if settings.isolation == "rlimits":
        os.chdir(settings.directory)
        return os.fork() or _become(settings, program, status, parent)
    with map_users(USER):
        linux.unshare(linux.ALL_NAMESPACES)
    build_root(settings.directory, settings.readable, settings.files_size, settings.num_files, USER)
    alive, held = os.pipe()
    if child := os.fork():
        return child
    os.close(held)
    _be_first(settings, program, status, alive)


def _be_first(settings: Settings, program: bytes, status: int, alive: int) -> NoReturn:
    """The first process of a PID namespace: with its end Linux ends all others in it.

    `alive`: readable once the process before this one, whose number is not to be seen here, has ended.
    """
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([alive], [], [], 0)[0]:
        os._exit(1)
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # the first process takes no signal without a handler
    child = os.fork() or _become(settings, program, status, os.getppid())
    ended = 0
    while ended != child:  # orphans come here too
        ended, how = os.wait()
    code = os.waitstatus_to_exitcode(how)
    os._exit(code if code >= 0 else 128 - code)


def _become(settings: Settings, program: bytes, status: int, parent: int) -> NoReturn:
    """Take everything away from this process, and let it become the program."""
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        beside = 2  # the two processes before it, where they are the same user's
        if settings.isolation == "namespaces" and os.getuid() != USER:
            beside = 0
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user forgets it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        Path(PROGRAM).write_bytes(program)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        _limit(settings, settings.num_processes + beside)
        linux.give_up_privileges()
        linux.install_filter(make_filter(beside_others=settings.isolation == "rlimits"))
        os.write(status, b"ready\n")
        environment = {"HOME": os.getcwd(), "TMPDIR": os.getcwd(), "LANG": "C.UTF-8"}
        os.execve(settings.python, [settings.python, "-I", "-B", "-u", PROGRAM], environment)
    except BaseException as error:
        os.write(status, f"{error}\n".encode())
        os._exit(1)


def _limit(settings: Settings, processes: int) -> None:
    limits = {
        resource.RLIMIT_AS: settings.memory,
        resource.RLIMIT_CPU: math.ceil(settings.seconds) + 1,
        resource.RLIMIT_FSIZE: settings.file_size,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
    }
    if settings.isolation == "namespaces":  # beside others it would count all of this user's
        limits[resource.RLIMIT_NPROC] = processes
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))
