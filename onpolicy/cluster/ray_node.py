"""Ray's processes of one node, reduced to those that a run needs."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from typing import Any

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


def start_node(*, head: bool, with_agents: bool = True, **parameters: Any) -> Any:
    """Start Ray's processes of a node (`ray._private.node.Node`), which end with this one.

    with_agents: whether the raylet has agents, which give actors their own environment variables (Ray's
    runtime_env). Each is a Python process that imports Ray for seconds before the raylet serves, and on
    a busy host the raylet gives up on it. parameters: further fields of `RayParams`.
    """
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


_closed: list[socket.socket] = []


def _closed_port() -> int:
    """Return a port of this host on which no process can listen while this process lives."""
    _closed.append(socket.socket())
    _closed[-1].bind(("127.0.0.1", 0))
    return int(_closed[-1].getsockname()[1])
