"""Inside `forked_processes()` commands of onpolicy, and what they start, are forked (fork_server.py).

`subprocess.Popen` behaves as ever. Tests of processes themselves, and at least one of each command,
start them anew: marker `anew`, or `forked_processes(False)`.
"""

import contextlib
import functools
import inspect
import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

from tests.support import sglang_ahead
from tests.support.fork_server import ForkServer
from tests.support.forked_workers import is_raylet, with_forked_workers

SGLANG = ("sglang_patches.server_process", "sglang_patches.check_flags")
MODULES = (
    *SGLANG, "onpolicy.cli", "onpolicy.cluster.local_ray", "tests.support.raylets", "benchmarks.push"
)  # fmt: skip
RUN = (
    "onpolicy.cluster.trainer_rank", "onpolicy.run.loop", "onpolicy.run.commands.verification",
    "onpolicy.training.fsdp.fsdp_model", "transformers.models.qwen3.modeling_qwen3",
)  # fmt: skip
"""What the processes of a run import, less the engine's: SGLang changes transformers."""

LIBRARIES = (
    "torch._inductor.compile_fx", "aiohttp.web", "compressed_tensors", "einops", "fastapi", "gguf",
    "google.protobuf.json_format", "huggingface_hub.hf_file_system", "IPython.display",
    "jsonschema", "loguru", "matplotlib.pyplot", "msgpack", "msgspec",
    "networkx", "openai.types.realtime", "openai.types.responses", "openai_harmony", "pdb",
    "pydantic.v1", "tiktoken", "torchvision.transforms.v2", "transformers.image_processing_utils",
    "typeguard", "uvicorn", "uvloop", "wcwidth", "wsproto", "xgrammar", "zmq.asyncio",
    "tests.support.bindings", "tests.support.quick_disk",
)  # fmt: skip
"""Most of what SGLang and Ray import besides. Ray itself reads its worker's variables when it is."""

ENGINE_VARIABLES = ("SGLANG_PLATFORM", "TORCHDYNAMO_DISABLE", "SGLANG_DISABLED_MODEL_ARCHS")
"""What SGLang and PyTorch read when an engine imports them."""

HIDE, BRING_BACK = "tests.support.sglang_ahead:hide", "tests.support.sglang_ahead:bring_back"
PLAIN = "plain"
"""The key of the server that has imported nothing of SGLang; a forked process may have none."""

_ENVIRONMENT = dict(os.environ)
"""The session's: what a test sets for its own processes, as a `sitecustomize`, is not for others'."""

_servers = {}
"""By the variables that were read; the one that is for no engine, by None."""

_one_at_a_time = threading.Lock()
_is_active = False
_HIDES = True
"""Whether the server of None has SGLang hidden (sglang_ahead.py)."""
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


@contextlib.contextmanager
def forked_in(environment):
    """Inside, processes are forked from servers of their own, whose imports have read `environment`."""
    global _ENVIRONMENT, _HIDES
    before, others = _ENVIRONMENT, dict(_servers)
    _ENVIRONMENT, _HIDES = environment, False
    _servers.clear()
    try:
        with forked_processes():
            yield
    finally:
        _servers.clear()  # they end with their channels
        _servers.update(others)
        _ENVIRONMENT, _HIDES = before, True


def use(server):
    """Fork all from this server, in a process that was forked itself."""
    global _is_active, _HIDES
    _is_active, _HIDES = True, sglang_ahead.is_hidden()
    _servers[None] = server
    if not _HIDES:
        _servers[PLAIN] = server
    subprocess.Popen._execute_child = _execute


def _execute(*args):
    given = _PARAMETERS.bind(*args).arguments
    program = _program(given["args"])
    if program is None or not _can_be_forked(given):
        if _is_active and is_raylet(given["args"]):
            return _execute_anew(args[0], with_forked_workers(given["args"]), *args[2:])
        return _execute_anew(*args)
    popen, streams = given["self"], [given["p2cread"], given["c2pwrite"], given["errwrite"]]
    environment = dict(os.environ if given["env"] is None else given["env"])
    is_engine = program[0] == "-m" and program[1] in SGLANG
    if environment.get("TORCHDYNAMO_DISABLE") == "1" or "FAKE_GPUS" in environment:
        environment |= _without_other_models()
    if is_engine and _is_only_hidden(environment):
        return _execute_anew(*args)
    popen.pid = _server_for(environment if is_engine else None, program).fork(
        [own if fd == -1 else fd for own, fd in enumerate(streams)],
        program=program,
        environment=environment,
        directory=os.fspath(given["cwd"] or os.getcwd()),
        has_own_session=given["start_new_session"],
        starts_others=not is_engine,  # its guard has one child
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


def _server_for(environment, program):
    """For an engine with these variables, or for everything else: None."""
    given = None if environment is None else _read_by_engines(environment)
    with _one_at_a_time:
        if None not in _servers:
            _servers[PLAIN] = ForkServer.start((*RUN, *LIBRARIES), _ENVIRONMENT)
            hidden = _servers[PLAIN].start_another([HIDE], _ahead()) if _HIDES else _servers[PLAIN]
            _servers[None] = hidden
        if given is None and PLAIN in _servers and _has_stock_engines({*program}):
            given = PLAIN
        if given not in _servers:
            base, modules = (
                (None, [BRING_BACK]) if _is_ahead(environment) else (PLAIN, sglang_ahead.ENGINE)
            )
            read = dict(zip(ENGINE_VARIABLES, given, strict=True))
            read = {name: value for name, value in read.items() if value is not None}
            _servers[given] = _servers[base].start_another(modules, read)
        return _servers[given]


def _read_by_engines(environment):
    return tuple(map(environment.get, ENGINE_VARIABLES))


def _ahead():
    """The variables under which SGLang is imported and hidden: those of an aligned engine."""
    known = {"SGLANG_PLATFORM": "onpolicy_cpu", "TORCHDYNAMO_DISABLE": "1"}
    return {**known, **_without_other_models()}


def _is_ahead(environment):
    return _HIDES and _read_by_engines(environment) == _read_by_engines(_ahead())


def _has_stock_engines(arguments):
    """Whether it looks like a command with engines for which SGLang is imported otherwise."""
    if {"bench", "--no-true-on-policy-mode"} & arguments:
        return True
    return (
        "train" in arguments and not {"--true-on-policy-mode", "--custom-config-path"} & arguments
    )


def _is_only_hidden(environment):
    """Whether what this process could fork has SGLang, but not as this engine would import it."""
    return None in _servers and PLAIN not in _servers and not _is_ahead(environment)


@functools.cache
def _without_other_models():
    """SGLang imports its models of all architectures; an aligned engine runs one that runs them all, and
    where GPUs are fakes none runs."""
    models = Path(find_spec("sglang").submodule_search_locations[0], "srt/models")
    others = {file.stem for file in models.glob("*.py")} - {"transformers"}
    return {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(others))}
