"""A cluster of a run's own: who gets in, and that nothing is left of it however its owner ends."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from onpolicy.cluster import local_ray
from onpolicy.cluster.placement import Host
from onpolicy.cluster.ray_session import when_it_fits
from onpolicy.config.groups import ClusterConfig
from onpolicy.errors import ConfigError, EngineError
from tests.support.footprint import Footprint
from tests.support.forked_processes import forked_processes
from tests.support.processes import command_line, listening_addresses

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _fork_processes(request):
    with forked_processes(request.node.get_closest_marker("anew") is None):
        yield


OWNER = """
import subprocess, sys
from onpolicy.cluster.ray_session import session
from onpolicy.config.groups import ClusterConfig

if __name__ == "__main__":
    with session(ClusterConfig()) as hosts:
        import ray

        @ray.remote(num_cpus=0)
        class Actor:
            def start(self):
                self.child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
                return self.child.pid

        actor = Actor.remote()
        print(len(hosts), hosts[0].is_here, ray.get(actor.start.remote()), flush=True)
        sys.stdin.readline()
"""

ASKER = """
import dataclasses, os, sys
from pathlib import Path
from onpolicy.cluster.ray_session import free_memory_on, gpus_on, session, told_by
from onpolicy.config.groups import ClusterConfig
from onpolicy.errors import ConfigError, EngineError
from onpolicy.run.launch.cluster_engines import require_shared
from onpolicy.system.free_memory import Gpu, gpus

def two():
    return (Gpu("H100", (9, 0), 5, 8), Gpu("H100", (9, 0), 6, 8))

if __name__ == "__main__":
    with session(ClusterConfig()) as (here,):
        there = dataclasses.replace(here, is_here=False)
        print(free_memory_on([there])[there])
        print(gpus_on([there])[there] == gpus(), told_by([there], two, "it")[there] == two())
        gone = dataclasses.replace(there, name="0" * len(there.name), label="gone")
        os.chdir(sys.argv[1])
        require_shared("--run-dir=here", Path.cwd(), [there])
        for ask in (
            lambda: free_memory_on([there, gone]),
            lambda: require_shared("--run-dir=own", Path("/proc/self/cwd"), [there]),
        ):
            try:
                ask()
            except ConfigError as error:
                print(error)
"""

STRANGER = """
import sys, ray
ray.init(sys.argv[1], logging_level="ERROR")
"""


@pytest.fixture
def owner(tmp_path):
    """A process in a session of its own whose actor has a child: (it, its footprint)."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    with TemporaryDirectory() as temporary:  # with a path short enough for sockets
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": temporary},
        )
        footprint = Footprint(process.pid, Path(temporary))
        hosts, is_here, child = process.stdout.readline().split()
        assert (hosts, is_here) == ("1", "True") and psutil.pid_exists(int(child))
        yield process, footprint
        process.kill()


@pytest.mark.anew
def test_it_listens_on_loopback_and_is_gone_when_its_owner_has_ended(owner):
    process, footprint = owner
    processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]
    assert {"raylet", "gcs_server"} <= {p.name() for p in processes}
    assert_nothing_waits_or_yields(processes)
    addresses = {address.removeprefix("::ffff:") for address in listening_addresses(processes)}
    assert addresses == {"127.0.0.1"}
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(60) == 0
    assert footprint.left(100) == []


STOPS = """
import sys, time
import psutil
from onpolicy.cluster import ray_session as session
from onpolicy.config.groups import ClusterConfig
from onpolicy.errors import EngineError
session._ANSWER_SECONDS = session._LEAVE_SECONDS = 2.0
with session.session(ClusterConfig()):
    found = {each.name(): each for each in psutil.Process().children(recursive=True)}
    stopped = found[sys.argv[1]]
    stopped.suspend()
    while stopped.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    try:
        session.alive_hosts()
    except EngineError as error:
        print("told:", error)
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("raylet", "Ray's node on this host stands still, and is not waited for"),
        ("gcs_server", "told: the head of the Ray cluster (its process gcs_server) has not"),
    ],
)
def test_a_process_of_rays_that_stands_still_holds_up_no_end(tmp_path, name, told):
    """A run whose raylet was stopped had saved all, and never ended."""
    script = tmp_path / "stops.py"
    script.write_text(STOPS)
    with TemporaryDirectory() as temporary:  # a path short enough for sockets
        ended = subprocess.run(
            [sys.executable, str(script), name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": temporary},
            timeout=200,
        )
        assert ended.returncode == 0 and told in ended.stdout, ended.stdout
        assert not list(Path(temporary).iterdir())


def assert_nothing_waits_or_yields(processes):
    """No dashboard, no agent of the raylet and no worker without work; and the one with work has no low
    priority."""
    own = [
        process for process in processes if process.name() != "raylet"
    ]  # which has flags for both
    names = {process: command_line(process).strip() for process in own}
    assert not any("dashboard" in name or "runtime_env" in name for name in names.values())
    (actor,) = (p for p, name in names.items() if "ray::" in name)
    assert names[actor].startswith("ray::Actor") and actor.nice() == processes[0].nice()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_its_owner_is_killed_and_nothing_is_written(owner, number):
    """Ray would write a stack for SIGTERM."""
    process, footprint = owner
    process.send_signal(number)
    assert process.wait() == -number
    assert footprint.left(100) == []
    assert process.stderr.read() == ""


def test_who_has_no_token_does_not_get_in(owner):
    process, _ = owner
    (gcs,) = [p for p in psutil.Process(process.pid).children(True) if p.name() == "gcs_server"]
    (port,) = {c.laddr.port for c in gcs.net_connections("inet") if c.status == "LISTEN"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
    stranger = subprocess.run(
        [sys.executable, "-c", STRANGER, f"127.0.0.1:{port}"],
        env={**environment, "RAY_AUTH_TOKEN": "another" * 5, "RAY_NUM_REDIS_GET_RETRIES": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert stranger.returncode != 0 and "Unauthenticated" in stranger.stderr


def test_a_host_says_what_memory_and_gpus_it_has_and_one_that_is_gone_is_named(tmp_path):
    script = tmp_path / "asker.py"
    script.write_text(ASKER)
    with TemporaryDirectory() as temporary:  # with a path short enough for sockets
        asker = subprocess.run(
            [sys.executable, str(script), temporary],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "TMPDIR": temporary},
        )
    assert asker.returncode == 0, asker.stderr[-2000:]
    free, answers, refused, unseen = asker.stdout.splitlines()
    assert 0 < int(free) <= psutil.virtual_memory().total
    assert answers == "True True"
    assert refused.startswith("gone (127.0.0.1): does not say how much memory is free there (")
    # What lies where each process works, and they work elsewhere.
    assert re.match(r"--run-dir=own: .* \(127\.0\.0\.1\) does not see /proc/self/cwd, and", unseen)


@pytest.mark.parametrize(
    ("address", "arrives_at", "looks"), [("", 1, 1), ("h:1", 3, 3), ("h:1", 99, None)]
)
def test_hosts_of_a_joined_cluster_are_waited_for_until_the_timeout(
    monkeypatch, address, arrives_at, looks
):
    """In a cluster of our own nobody is waited for."""
    from onpolicy.cluster import ray_session

    seen = []

    def alive_hosts():
        seen.append(len(seen) + 1)
        return [Host("x", "x", "x", 1, 0)] * (len(seen) >= arrives_at)

    def place(hosts):
        if not hosts:
            raise ConfigError("0 hosts and 1 rank")
        return len(hosts)

    monkeypatch.setattr(ray_session, "alive_hosts", alive_hosts)
    monkeypatch.setattr(ray_session, "_POLL_SECONDS", 0.01)
    timeout = 60.0 if looks else 0.05
    monkeypatch.setattr(ray_session, "_PLACEMENT_SECONDS", timeout)
    cluster = ClusterConfig(ray_address=address)
    if looks is None:
        with pytest.raises(ConfigError, match="0 hosts and 1 rank"):
            when_it_fits(place, cluster)
    else:
        assert when_it_fits(place, cluster) == 1 and len(seen) == looks


def test_after_a_loss_hosts_that_are_not_enough_are_not_waited_for(monkeypatch):
    """A host that is lost does not join again by itself."""
    from onpolicy.cluster import ray_session

    def place(hosts):
        raise ConfigError("1 host and 2 ranks")

    monkeypatch.setattr(ray_session, "alive_hosts", list)
    monkeypatch.setattr(ray_session, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(ray_session, "_SECONDS_AFTER_A_LOSS", 0.05)
    monkeypatch.setattr(ray_session, "_PLACEMENT_SECONDS", 1e6)
    cluster = ClusterConfig(ray_address="h:1")
    with pytest.raises(EngineError, match=r"what is left .* is not enough\. 1 host and 2 ranks"):
        when_it_fits(place, cluster, after_a_loss=True)


def started(process_type):
    commands = []
    start = local_ray._without_agents(lambda command, *_, **options: commands.append(command))
    start(["program", "--node_id=1"], process_type, fate_share=True)
    return commands[0]


def test_a_raylet_has_no_agent_that_computes_and_waits_for_no_port_of_one():
    flags = dict(part.split("=", 1) for part in started("raylet")[1:])
    assert flags.pop("--node_id") == "1"
    assert {flags.pop(f"--{name}") for name in local_ray.AGENT_COMMANDS} == {local_ray.WAITS}
    assert flags.keys() == {f"--{name}" for name in local_ray.AGENT_PORTS}
    assert len({*flags.values()}) == len(local_ray.AGENT_PORTS)
    for port in map(int, flags.values()):
        with pytest.raises(OSError), socket.socket() as stranger:  # nobody else takes it
            stranger.bind(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_other_processes_of_ray_are_started_as_ray_starts_them():
    assert started("gcs_server") == ["program", "--node_id=1"]
