"""A Ray cluster of one host, for one run: it ends with the run, however that ends.

`python -m onpolicy.cluster.local_ray` is a guard (system/guard.py) in front of Ray's processes, and so
in front of all that actors start. Its owner holds its standard input; when that closes, all of them are
killed, and the directory of the session is removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from onpolicy.cluster import environment
from onpolicy.errors import EngineError
from onpolicy.system import guard
from onpolicy.system.memory import num_gpus

ADDRESS = "address of the cluster: "
"""What the line begins with that the owner waits for."""

LEAST_STORE, MOST_STORE = 80 << 20, 2 << 30
"""Bytes of Ray's object store, which takes what is used of it; 75 MiB is the least Ray accepts."""

SHARED_MEMORY = "/dev/shm"

SYSTEM = {
    # Ray starts a worker for each core beforehand, and a driver waits until all have come.
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
    # Ray's workers yield to everything else (15); ranks would yield to the engines beside them.
    "worker_niceness": 0,
}
"""Ray's settings (ray_config_def.h) as a run on one host needs them."""


@contextmanager
def local_ray() -> Iterator[str]:
    """Start a cluster on this host, and end it afterwards: the address to join it by.

    Its GPUs are those that PyTorch sees; Ray's own count needs a library of the driver's.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(num_gpus())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # an interrupt from the keyboard is for the run, which ends us
    )
    try:
        yield _address(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        if line.startswith(ADDRESS):
            return line.removeprefix(ADDRESS).strip()
        said.append(line)
    raise EngineError(
        f"Ray could not be started on this host (exit code {process.wait()}). It said:\n"
        f"{''.join(said[-20:])}"
    )


def main(argv: Sequence[str]) -> int:
    return guard.run(partial(_serve, int(argv[0])))


def _serve(num_gpus: int, directory: Path) -> None:
    """Start Ray's processes, say where, and wait until the guard ends us."""
    os.environ["TMPDIR"] = str(directory)  # of all that actors leave, too
    on_memory, store = _object_store()
    node = start_node(
        head=True,
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
    signal.pause()


def start_node(*, head: bool, **parameters: Any) -> Any:
    """Start Ray's processes of a node (`ray._private.node.Node`), which end with this one.

    `parameters`: what is its own of `RayParams`.
    """
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class WithoutDashboard(Node):
        def start_api_server(self, **_: object) -> None:
            """Start none: without a dashboard it only counts usage, and Ray waits seconds for it."""

    given = RayParams(
        include_dashboard=False,
        include_log_monitor=False,  # type: ignore[arg-type]
        no_monitor=True,
        min_worker_port=0,
        max_worker_port=0,
        **parameters,
    )
    node = WithoutDashboard(given, head=head, shutdown_at_exit=False, spawn_reaper=True)
    # Ray's workers end when there is no process with their raylet's number: it must leave no zombie.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return node


def _object_store() -> tuple[bool, int]:
    """Whether it lies in shared memory, and its bytes: half of what is free there, if that is enough."""
    half = shutil.disk_usage(SHARED_MEMORY).free // 2
    return half >= LEAST_STORE, min(max(half, LEAST_STORE), MOST_STORE)


if __name__ == "__main__":
    environment.prepare(local=True)
    sys.exit(main(sys.argv[1:]))
