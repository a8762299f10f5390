"""Child process of one SGLang server: start, supervision and end; checks of its address come first.

`cause_of_death` tells why an engine died, and what to try, from its exit code and its log: SGLang's
first process kills itself and all others when one of them fails, so its exit code is SIGKILL's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import requests

from onpolicy.config.groups import EngineConfig
from onpolicy.errors import ConfigError, EngineError
from onpolicy.rollout.early_server import GUARDED, command, take_over
from onpolicy.rollout.engine_args import EngineSpec, engine_environment, engine_flags, secret_flags
from onpolicy.system import files, guard
from onpolicy.system.network import free_port, listen
from onpolicy.system.proxies import ask

logger = logging.getLogger(__name__)

_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.1
_NEWS_SECONDS = 30.0
_TOKEN_SECONDS = 20.0

ONE_TOKEN = {
    "input_ids": [0],
    "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "sampling_seed": 0},
}
"""A request that only a server that can sample answers; SGLang's own check of health does the same,
and then sleeps for a second."""


class EngineServer:
    """The server behind one URL. Its process is a guard (system/guard.py) in front of it."""

    def __init__(self, spec: EngineSpec, port: int, log_file: Path):
        self.spec, self.port, self.log_file = spec, port or free_port(spec.host), log_file
        if port:
            require_free_port(spec.host, port)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.spec.host}:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit code, if the process has ended by itself."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        """Start the process; return at once."""
        files.make_private(self.log_file.parent)
        flags, secrets = engine_flags(self.spec, self.port), secret_flags(self.spec)
        environment = {**environment_of(self.spec), GUARDED: "1"}
        self._oom_kills = oom_kills()
        with open(self.log_file, "ab", opener=open_private) as log:
            self._log_start = log.tell()
            orders = {"flags": flags, "secrets": secrets, "log": str(self.log_file.absolute())}
            self._process = take_over(environment, orders)
            if self._process is not None:
                return
            self._process = subprocess.Popen(
                command(*flags),
                # The server ends when this pipe closes, so it cannot outlive us however we end.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once; its log says why
            self._process.stdin.write(json.dumps(secrets).encode() + b"\n")
            self._process.stdin.flush()

    def wait_until_healthy(self, timeout: float) -> None:
        """Block until the server has sampled a token. Raises EngineError with the end of its log if
        it dies."""
        deadline = time.monotonic() + timeout
        news = time.monotonic() + _NEWS_SECONDS
        while time.monotonic() < deadline:
            if not self.is_running:
                raise EngineError(self._death())
            with contextlib.suppress(requests.RequestException):
                # Freeze what its first token imported, or each push would walk those objects. SGLang
                # does it sooner, and loses it if its port is not open yet (sgl-project/sglang#40653).
                if self._post("/generate", json=ONE_TOKEN).ok and self._post("/freeze_gc").ok:
                    return
            if time.monotonic() > news:
                logger.info("%s is still starting; its log: %s", self.url, self.log_file)
                news += _NEWS_SECONDS
            time.sleep(_POLL_SECONDS)
        self.stop()
        raise EngineError(
            f"{self.url} did not answer within --rollout-start-timeout={timeout:g} seconds. Its log: "
            f"{self.log_file}\n{self.log_tail()}"
        )

    def _post(self, path: str, **given: Any) -> requests.Response:
        key = self.spec.admin_api_key or self.spec.api_key  # each call takes the key of runs
        headers = {"Authorization": f"Bearer {key}"}
        return ask("POST", self.url + path, headers=headers, timeout=_TOKEN_SECONDS, **given)

    def stop(self) -> None:
        """End the server and all its processes."""
        if self._process is None:
            return
        guard.let_end(self._process)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:  # the guard hangs; its session is the server's too
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def _death(self) -> str:
        return (
            f"the engine at {self.url} ended before it was ready: {self.cause_of_death()}\n"
            f"Its exit code: {self.exit_code}. The end of its log ({self.log_file}):\n{self.log_tail()}"
        )

    def cause_of_death(self) -> str:
        """Return what the process died of since its last start, and what to try."""
        with self.log_file.open("rb") as log:
            log.seek(self._log_start)
            text = log.read().decode(errors="replace")
        return cause_of_death(self.exit_code, text, oom_kills() - self._oom_kills)

    def log_tail(self, lines: int = 12) -> str:
        """Return the last lines of the log."""
        with self.log_file.open(errors="replace") as log:
            return "".join(f"    {line}" for line in deque(log, lines)).rstrip()


MakeServer = Callable[[EngineSpec, int, Path], EngineServer]


def make_servers(
    specs: Sequence[EngineSpec], base_port: int, logs: Path, make_server: MakeServer
) -> list[EngineServer]:
    """Return a server for each spec, on ports from `base_port` on, or free ones if it is 0."""
    return [
        make_server(spec, base_port and base_port + i, logs / f"engine_{i}.log")
        for i, spec in enumerate(specs)
    ]


def environment_of(spec: EngineSpec) -> dict[str, str]:
    """Return the variables of a server: this process's, without its rank's and Ray's."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    prefixes = ("GROUP_", "ROLE_", "TORCHELASTIC_", "RAY_", "PYTHONBREAKPOINT")  # Ray sets it
    kept = {k: v for k, v in os.environ.items() if k not in names and not k.startswith(prefixes)}
    return {**kept, **engine_environment(spec)}


def open_private(path: str, flags: int) -> int:
    """Open a file for its owner alone, since logs may hold the run's arguments."""
    file = os.open(path, flags, 0o600)
    os.fchmod(file, 0o600)
    return file


_ANSWER_SECONDS = (10.0, 60.0)
"""Seconds to connect, and to answer: a server that is sampling for another run answers late."""

CONTROL_CALL = "/end_weight_update"
"""A call that changes a server (`sglang_patches/who_may_ask.py`)."""


def require_addresses(engine: EngineConfig, api_key: str, control_key: str = "") -> None:
    """Raise ConfigError if servers cannot listen where they are to be started, do not answer at the
    given URLs, or would not take weights with `control_key` (empty: `api_key`)."""
    if engine.rollout_server_url:
        _require_servers(engine.rollout_server_url, api_key, control_key or api_key)
    else:
        require_place(engine.rollout_host, engine.rollout_base_port, engine.rollout_num_engines)


def require_place(host: str, base_port: int, num_servers: int = 1) -> None:
    """Raise ConfigError if servers cannot listen on `host`, on `base_port` and the ports after it."""
    try:
        if not host:
            raise OSError("an empty name")
        free_port(host)
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(
            f"--rollout-host={host}: no server can listen there ({error}). Give an address of this "
            "host, such as 127.0.0.1, or leave the flag out."
        ) from error
    if base_port:
        for port in range(base_port, base_port + num_servers):
            require_free_port(host, port)


def require_free_port(host: str, port: int) -> None:
    """Raise ConfigError if nothing can listen on the port."""
    try:
        listen(host, port).close()
    except OSError as error:
        raise ConfigError(
            f"--rollout-base-port: port {port} on {host} cannot be used ({error.strerror}). "
            "Choose another, or leave the flag out to take free ones."
        ) from error


def _require_servers(urls: Sequence[str], api_key: str, control_key: str) -> None:
    headers, of_control = (
        {"Authorization": f"Bearer {key}"} if key else {} for key in (api_key, control_key)
    )
    for url in urls:
        if problem := _problem(f"{url.rstrip('/')}/server_info", headers):
            raise ConfigError(
                f"--rollout-server-url={url}: {problem}. Start a server with `onpolicy serve`, and give "
                "the URL and the key that it prints."
            )
        # Without a body and by another method than its own: the key is looked at, and nothing else.
        control = f"{url.rstrip('/')}{CONTROL_CALL}"
        answer = ask("GET", control, headers=of_control, timeout=_ANSWER_SECONDS)
        if answer.status_code == 403:
            raise ConfigError(
                f"--rollout-api-key=...: {url} takes it for the key of clients, with which no run can "
                "push weights. Give the key of runs, as the last line that `onpolicy serve` prints does."
            )


def _problem(url: str, headers: dict[str, str]) -> str | None:
    try:
        response = ask("GET", url, headers=headers, timeout=_ANSWER_SECONDS)
        if response.status_code in (401, 403):
            return "refuses --rollout-api-key" if headers else "asks for an --rollout-api-key"
        response.raise_for_status()
        is_server = isinstance(response.json()["internal_states"], list)
    except (requests.ConnectionError, requests.Timeout) as error:
        return f"nothing answers there ({_root(error)})"
    except (requests.RequestException, UnicodeError, ValueError, KeyError, TypeError):
        is_server = False
    return None if is_server else "what answers there is no SGLang server"


def _root(error: Exception) -> str:
    """Return the system's words for a failed connection, without the wrapping of libraries."""
    cause = getattr(error.args[0] if error.args else error, "reason", error)
    return str(cause).rsplit(": ", 1)[-1]


VMSTAT = Path("/proc/vmstat")

_ENDED_ITSELF = "kill_process_tree called"

_OUT_OF_MEMORY = (
    r"(?P<what>MemoryError\b.*|DefaultCPUAllocator: .*|OutOfMemoryError: .*|CUDA out of memory.*)"
)
_LESS_MEMORY = (
    "Give --sglang-max-total-tokens for a smaller cache, --sglang-mem-fraction-static on a GPU, a "
    "smaller model, or free some memory."
)

CAUSES = (
    (r"onpolicy\.errors\.\w+: (?P<what>.*)", "{what}", ""),
    (_OUT_OF_MEMORY, "it ran out of memory ({what}).", _LESS_MEMORY),
    (
        r"(?P<what>(?:ModuleNotFoundError|ImportError): .*)",
        "an import failed in {where} ({what}).",
        "Install what is missing in the environment that runs this: `make setup` on a CPU, "
        "`pip install -e '.[gpu]'` on a GPU.",
    ),
    (
        r"(?P<what>OSError: \[Errno 98\].*|.*[Aa]ddress already in use.*)",
        "its port was taken ({what}).",
        "Give another --rollout-base-port, or leave it out for a free one.",
    ),
    (
        r"^(?:.*\] )?(?P<what>(?:\w+\.)*\w+(?:Error|Exception)\b: .*)",
        "{what} in {where}.",
        "If that is one of onpolicy's files, it is a fault of ours; if one of SGLang's, of a flag or a "
        "checkpoint that it cannot take. The log has the traceback.",
    ),
)
"""(pattern, cause, remedy): tried in this order, on the first line of the log that matches."""

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def cause_of_death(exit_code: int | None, log: str, oom_kills: int = 0) -> str:
    """Return what the engine died of, and what to try.

    exit_code: the guard's, which repeats its server's, 128 + n after signal n; -n if the guard
    itself was ended. oom_kills: processes that the kernel has killed for lack of memory meanwhile.
    """
    if oom_kills:
        return (
            f"the kernel ended {oom_kills} processes of this host for want of memory meanwhile "
            f"(oom_kill in {VMSTAT}), this engine most likely. {_LESS_MEMORY}"
        )
    if _ENDED_ITSELF in log or exit_code in (None, 1, 2):
        for pattern, says, remedy in CAUSES:
            if match := re.search(pattern, log, re.MULTILINE):
                what = says.format(what=match["what"].strip(), where=_where(log[: match.start()]))
                return f"{what} {remedy}".strip()
    return _of_signal(exit_code)


def _of_signal(exit_code: int | None) -> str:
    if exit_code == 0:
        return (
            "it was asked to end (SIGTERM to its guard), by somebody or by a scheduler of jobs. Start "
            "it again, and ask who ends processes on this host."
        )
    code = exit_code or 0
    try:
        name = signal.Signals(-code if code < 0 else code - 128).name
    except ValueError:
        return f"it ended with exit code {exit_code}, and its log names no error. Read the log."
    whose = "its guard was" if code < 0 else "it was"
    who = "a process of this host, not its guard and not the kernel's OOM killer, sent it"
    crashed = "it crashed; the log's last lines say where, if anything does"
    sent = who if name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP") else crashed
    return f"{whose} ended by {name}: {sent}. Start it again; if it comes again, read its log."


def _where(log: str) -> str:
    """Return the file and function of the innermost frame of the last traceback in `log`."""
    frames = list(_FRAME.finditer(log))
    if not frames:
        return "its start"
    frame = frames[-1]
    return f"{frame['function']} of {frame['file']}, line {frame['line']}"


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory; 0 where it does not say."""
    try:
        match = re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0
