"""A Ray cluster of one host for one run, which ends whenever the run ends.

`python -m onpolicy.cluster.local_ray` is a guard (system/guard.py) over Ray's processes, and so over
everything that actors start. Its owner holds its standard input; when that closes, it kills all of them
and removes the session's directory. They also end with the first of Ray's own processes that ends, and
the owner notices at once; Ray's C++ would abort the owner only a minute later.

`start_node` starts no more of Ray's processes than a run needs.
"""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

from onpolicy.cluster import ray_environment
from onpolicy.errors import EngineError, in_one_line
from onpolicy.system import guard
from onpolicy.system.free_memory import num_gpus

logger = logging.getLogger(__name__)

ADDRESS = "address of the cluster: "
"""The beginning of the line that the owner waits for."""

LEAST_STORE, MOST_STORE = 80 << 20, 2 << 30
"""The least and most bytes of Ray's object store, allocated on use; Ray accepts 75 MiB or more."""

SHARED_MEMORY = "/dev/shm"

SYSTEM = {
    # Ray starts a worker for each core in advance, and a driver waits for all of them.
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
    # Ray's workers are nice (15) by default; ranks would then yield to the engines beside them.
    "worker_niceness": 0,
    # Metrics go to an agent, and there is none (`start_node`).
    "enable_metrics_collection": False,
}
"""Ray's settings (ray_config_def.h) for a run on one host."""

ATTEMPTS = 3
"""The number of attempts to start Ray: on a busy host it gives up after 30 s, a limit that no setting
changes (ray/_private/node.py)."""

_ATTEMPT_SECONDS = 120.0
"""The most seconds for one start of Ray before another attempt; Ray's own limits end most earlier."""

_END_SECONDS = 20.0
"""The most seconds for a guard to end its processes before it is killed."""

AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)
"""The raylet flags for its agents' ports; given these, it does not wait for agents to report them."""

AGENT_COMMANDS = ("dashboard_agent_command", "runtime_env_agent_command")
"""The raylet flags for its agents' programs; a raylet refuses to start without them."""

WAITS = "sh -c cat"
"""A program that accepts any arguments, and ends when its standard input closes, which the raylet holds;
a raylet ends with the first of its agents."""

_begun: subprocess.Popen[str] | None = None
"""The guard whose Ray is starting, until `local_ray` takes it over."""

_closed: list[socket.socket] = []


@contextmanager
def local_ray(seconds: float, on_loss: Callable[[EngineError], None]) -> Iterator[str]:
    """Yield the address of a cluster on this host, which is started before and ended afterwards.
    Its number of GPUs is PyTorch's; Ray's own count needs a library of the driver. seconds: the
    limit on the start, with all attempts. `on_loss` is called in another thread if the cluster ends
    meanwhile. Raises EngineError if Ray does not start."""
    process, address = _started(time.monotonic() + seconds)
    has_ended = threading.Event()
    threading.Thread(target=_watch, args=(process, has_ended, on_loss), daemon=True).start()
    try:
        yield address
    finally:
        has_ended.set()
        _end(process)


@contextmanager
def begun() -> Iterator[None]:
    """Start a cluster on this host in the background, until `local_ray` is called within the context."""
    global _begun
    _begun = _guard()
    try:
        yield
    finally:
        if _begun is not None:
            _end(_begun)
            _begun = None


def _taken_over() -> subprocess.Popen[str] | None:
    global _begun
    taken, _begun = _begun, None
    return taken


def _started(deadline: float) -> tuple[subprocess.Popen[str], str]:
    """Return a guard whose Ray has started, and Ray's address."""
    for attempt in range(1, ATTEMPTS + 1):
        process = _taken_over() or _guard()
        left = max(deadline - time.monotonic(), 0.1)
        if attempt < ATTEMPTS:
            left = min(left, _ATTEMPT_SECONDS)
        address, said = _address(process, left)
        if address:
            return process, address
        _end(process)
        if time.monotonic() >= deadline:
            break
        logger.warning("Ray did not start on this host (attempt %d of %d)", attempt, ATTEMPTS)
    raise EngineError(
        f"Ray did not start on this host in {attempt} attempts. It said last: {said}. A host that is "
        "busy, or short of memory or of room in TMPDIR and /dev/shm, is the common cause: try again "
        "when it is less busy, give more time (--rollout-start-timeout), or join a cluster that runs "
        "(--ray-address)."
    )


def _guard() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(num_gpus())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # an interrupt from the keyboard is for the run, which ends us
    )


def _address(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """Return the address that a guard prints within `seconds`, else "", and the last line before it."""
    assert process.stdout is not None
    timer = threading.Timer(seconds, _end, (process,))
    timer.start()
    last = f"nothing in {seconds:.0f} s"
    try:
        for line in process.stdout:
            if line.startswith(ADDRESS):
                return line.removeprefix(ADDRESS).strip(), last
            last = line.strip() or last
    finally:
        timer.cancel()
    return "", in_one_line(Exception(last))


def _watch(
    process: subprocess.Popen[str],
    has_ended: threading.Event,
    on_loss: Callable[[EngineError], None],
) -> None:
    """Read a guard's output; if it ends before `has_ended` is set, Ray's processes have ended."""
    assert process.stdout is not None
    for line in process.stdout:
        logger.debug("Ray: %s", line.rstrip())
    if not has_ended.is_set():
        on_loss(
            EngineError(
                "Ray's processes on this host have ended: one of them was killed, or ended by itself, "
                "and a run cannot go on without them. Start it again, with --load if it has saved."
            )
        )


def _end(process: subprocess.Popen[str]) -> None:
    """Let a guard end all its processes, and wait for it; kill a guard that does not answer."""
    guard.let_end(process)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _serve(num_gpus: int, directory: Path) -> None:
    """Start Ray's processes, print the address, and wait until one ends, or the guard ends us."""
    guard.end_orphans_after_guard(directory)  # Ray's workers outlive its raylet
    os.environ["TMPDIR"] = str(directory)  # for files that actors leave, too
    on_memory, store = _object_store()
    node = start_node(
        head=True,
        with_agents=False,
        temp_dir=str(directory),
        session_name="ray",  # sockets below it have short names
        node_ip_address="127.0.0.1",
        num_cpus=len(os.sched_getaffinity(0)),
        num_gpus=num_gpus,
        object_store_memory=store,
        plasma_directory=None if on_memory else str(directory),
        _system_config=SYSTEM,
    )
    print(f"{ADDRESS}{node.gcs_address}", flush=True)
    own = [one.process.pid for each in node.all_processes.values() for one in each]
    connection.wait([os.pidfd_open(pid) for pid in own])


def _object_store() -> tuple[bool, int]:
    """Return whether the object store fits shared memory, and its bytes: half of the free ones."""
    half = shutil.disk_usage(SHARED_MEMORY).free // 2
    return half >= LEAST_STORE, min(max(half, LEAST_STORE), MOST_STORE)


def start_node(*, head: bool, with_agents: bool = True, **parameters: Any) -> Any:
    """Start Ray's processes of a node (`ray._private.node.Node`), which end with this one.

    with_agents: whether the raylet has agents, which give actors their own environment variables (Ray's
    runtime_env). Each is a Python process that imports Ray for seconds before the raylet serves, and on
    a busy host the raylet gives up on it. parameters: further fields of `RayParams`."""
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class WithoutDashboard(Node):
        def start_api_server(self, **_: object) -> None:
            """Start none: without a dashboard it only counts usage, and Ray waits seconds for it."""

    if not with_agents:
        services.start_ray_process = _without_agents(services.start_ray_process)
    given = RayParams(
        include_dashboard=False,
        include_log_monitor=False,  # type: ignore[arg-type]
        no_monitor=True,
        min_worker_port=0,
        max_worker_port=0,
        **parameters,
    )
    node = WithoutDashboard(given, head=head, shutdown_at_exit=False, spawn_reaper=True)
    # Ray's workers end once no process has their raylet's id, so it must not stay as a zombie.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return node


def _without_agents(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a starter of Ray's processes; a raylet gets programs that only wait as its agents."""

    def start_ray_process(command: list[str], process_type: str, **options: Any) -> Any:
        if process_type == "raylet":  # the last of equal flags counts
            command = [*command, *(f"--{name}={WAITS}" for name in AGENT_COMMANDS)]
            command += [f"--{name}={_closed_port()}" for name in AGENT_PORTS]
        return start(command, process_type, **options)

    return start_ray_process


def _closed_port() -> int:
    """Return a port of this host on which no process can listen while this process lives."""
    _closed.append(socket.socket())
    _closed[-1].bind(("127.0.0.1", 0))
    return int(_closed[-1].getsockname()[1])


if __name__ == "__main__":
    ray_environment.prepare(local=True)
    sys.exit(guard.run(partial(_serve, int(sys.argv[1]))))
