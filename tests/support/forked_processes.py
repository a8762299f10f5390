"""Inside `forked_processes()` commands of onpolicy, and what they start, are forked (fork_server.py).

`subprocess.Popen` behaves as ever. Tests of processes themselves, and at least one of each command,
start them anew: marker `anew`, or `forked_processes(False)`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys

from tests.support.fork_server import ForkServer

MODULES = (
    "sglang_patches.serve",
    "sglang_patches.check_flags",
    "onpolicy.cli",
)
RUN = (
    "onpolicy.run.loop", "onpolicy.run.verify",
    "onpolicy.train.fsdp.trainer", "transformers.models.qwen3.modeling_qwen3",
)  # fmt: skip
"""What the processes of a run import, less the engine's: SGLang changes transformers."""

LIBRARIES = (
    "torch._inductor.compile_fx", "compressed_tensors", "fastapi", "gguf", "IPython.display", "loguru",
    "networkx", "openai.types.responses", "tiktoken", "uvicorn", "uvloop", "xgrammar",
)  # fmt: skip
"""Most of what SGLang imports besides."""

ENGINE = (
    "sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.models.registry",
)  # fmt: skip
ENGINE_ENVIRONMENT = {"SGLANG_PLATFORM": "onpolicy_cpu", "TORCHDYNAMO_DISABLE": "1"}
"""What SGLang and PyTorch read when an aligned engine imports them."""

_servers: dict[bool, ForkServer] = {}
_is_active = False
_execute_anew = subprocess.Popen._execute_child
_PARAMETERS = inspect.signature(_execute_anew)
_UNUSUAL = ("preexec_fn", "pass_fds", "executable", "shell", "process_group")


@contextlib.contextmanager
def forked_processes(active=True):
    global _is_active
    before, _is_active = _is_active, active
    subprocess.Popen._execute_child = _execute
    try:
        yield
    finally:
        _is_active = before


def use(server):
    """Fork all from this server, in a process that was forked itself."""
    global _is_active
    _is_active = True
    _servers.update({True: server, False: server})
    subprocess.Popen._execute_child = _execute


def _execute(*args):
    given = _PARAMETERS.bind(*args).arguments
    program = _program(given["args"])
    if program is None or not _can_be_forked(given):
        return _execute_anew(*args)
    popen, streams = given["self"], [given["p2cread"], given["c2pwrite"], given["errwrite"]]
    environment = dict(os.environ if given["env"] is None else given["env"])
    popen.pid = _server_for(environment).fork(
        [own if fd == -1 else fd for own, fd in enumerate(streams)],
        program=program,
        environment=environment,
        directory=os.fspath(given["cwd"] or os.getcwd()),
        has_own_session=given["start_new_session"],
        starts_others=program[1:2] != ["sglang_patches.serve"],  # its guard has one child
    )
    popen._child_created = True
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    popen._close_pipe_fds(*(given[end] for end in ends))
    return None


def _can_be_forked(given):
    return _is_active and not any(given[name] not in (None, (), False, -1) for name in _UNUSUAL)


def _program(command):
    """What Python is to run, if it is one of ours: ["-m", module, argument, ...] or [script, ...]."""
    if isinstance(command, (str, bytes, os.PathLike)) or command[0] != sys.executable:
        return None
    program = [os.fspath(argument) for argument in command[1:] if argument != "-u"]
    is_ours = program[1] in MODULES if program[0] == "-m" else program[0].endswith(".py")
    return program if is_ours else None


def _server_for(environment):
    is_engine = ENGINE_ENVIRONMENT.items() <= environment.items()
    if is_engine not in _servers:
        modules, environment = (ENGINE, ENGINE_ENVIRONMENT) if is_engine else ((), {})
        _servers[is_engine] = ForkServer.start((*RUN, *LIBRARIES, *modules), environment)
    return _servers[is_engine]
