"""What Ray's processes of a run's own node are started with."""

import socket

import pytest

from onpolicy.cluster import ray_node


def started(process_type):
    commands = []
    start = ray_node._without_agents(lambda command, *_, **options: commands.append(command))
    start(["program", "--node_id=1"], process_type, fate_share=True)
    return commands[0]


def test_a_raylet_has_no_agent_that_computes_and_waits_for_no_port_of_one():
    flags = dict(part.split("=", 1) for part in started("raylet")[1:])
    assert flags.pop("--node_id") == "1"
    assert {flags.pop(f"--{name}") for name in ray_node.AGENT_COMMANDS} == {ray_node.WAITS}
    assert flags.keys() == {f"--{name}" for name in ray_node.AGENT_PORTS}
    assert len({*flags.values()}) == len(ray_node.AGENT_PORTS)
    for port in map(int, flags.values()):
        with pytest.raises(OSError), socket.socket() as stranger:  # nobody else takes it
            stranger.bind(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_other_processes_of_ray_are_started_as_ray_starts_them():
    assert started("gcs_server") == ["program", "--node_id=1"]
