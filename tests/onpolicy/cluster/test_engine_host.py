"""Servers behind the actor of a host, which dies here. In Ray: tests/e2e/test_cluster.py."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from onpolicy.cluster import engine_host
from onpolicy.cluster.engine_host import EngineHost, PlacedServer, make_server
from onpolicy.errors import ConfigError, EngineError, HostLostError
from onpolicy.rollout.server import EngineServer

LOG = Path("logs/engine_0.log")


class Server:
    """What an actor starts, here."""

    ports_held: ClassVar[set[int]] = set()

    def __init__(self, spec, port, log_file):
        if port in Server.ports_held:
            Server.ports_held.discard(port)  # the guard has ended it by the next time
            raise ConfigError(f"--rollout-base-port: port {port} cannot be used")
        self.spec, self.port, self.log_file = spec, port or 20001, log_file
        self.is_running, self.exit_code = False, None

    def start(self):
        self.is_running = True

    def stop(self):
        self.is_running = False

    def log_tail(self, lines):
        return f"{lines} lines"


class Method:
    def __init__(self, actor, name):
        self.actor, self.name = actor, name

    def remote(self, *args):
        return lambda: getattr(self.actor.host, self.name)(*args)


class Actor:
    """Ray's handle of one."""

    def __init__(self):
        self.host = EngineHost(os.getcwd())

    def __getattr__(self, name):
        return Method(self, name)


@pytest.fixture
def actors(monkeypatch):
    """The actors by their host; one that is taken out has died, a host without a key is gone."""
    found = {"b": Actor(), "c": Actor()}

    def result(call, seconds):
        try:
            return call()
        except AttributeError as error:  # a dead actor has no host
            raise EngineError("gone") from error

    def actor(node):
        if node not in found:
            return SimpleNamespace(add=SimpleNamespace(remote=lambda *_: lambda: None.gone))
        found[node] = found[node] or Actor()
        return found[node]

    monkeypatch.setattr(engine_host, "EngineServer", Server)
    monkeypatch.setattr(engine_host, "_result", result)
    monkeypatch.setattr(engine_host, "_actor", actor)
    monkeypatch.setattr(engine_host, "_PAUSE_SECONDS", 0.001)
    return found


def on(node):
    return SimpleNamespace(node=node, host=f"10.0.0.{ord(node) - ord('`')}")


def nowhere(spec, error):
    raise HostLostError(f"{spec.host}: {error}")


@pytest.fixture
def server(actors):
    return PlacedServer(on("b"), 0, LOG, nowhere)


def kill_actor(actors):
    actors["b"].host = None
    actors["b"] = None


def test_what_a_group_asks_of_a_server_is_asked_of_its_host(server):
    assert server.url == "http://10.0.0.2:20001" and server.log_file == LOG.absolute()
    assert not server.is_running
    server.start()
    assert server.is_running and server.exit_code is None and server.log_tail(3) == "3 lines"
    server.stop()
    assert not server.is_running


def test_servers_whose_actor_died_do_not_run_and_start_again_at_their_port(server, actors):
    server.start()
    port = server.port
    kill_actor(actors)
    Server.ports_held = {port}
    assert not server.is_running and "10.0.0.2" in server.log_tail()
    server.stop()
    server.start()
    assert server.is_running and server.port == port and actors["b"] is not None


def lose_host(actors, node):
    actors.pop(node).host = None


def test_a_server_whose_host_is_gone_starts_on_the_next_one_that_takes_it(actors):
    """At a port of its own there; and it is told of each host that is gone, once."""
    actors["d"] = Actor()
    told = []

    def elsewhere(spec, error):
        told.append((spec.node, str(error)))
        return on({"b": "c", "c": "d"}[spec.node])

    server = PlacedServer(on("b"), 0, LOG, elsewhere)
    server.port = 20002  # a free one, which is not asked for there
    server.start()
    lose_host(actors, "b")
    lose_host(actors, "c")
    assert not server.is_running
    server.start()
    assert server.is_running and server.url == "http://10.0.0.4:20001"
    assert told == [("b", "gone"), ("c", "gone")]


def test_a_port_that_was_asked_for_is_asked_for_on_the_next_host_too(actors):
    server = PlacedServer(on("b"), 20007, LOG, lambda spec, error: on("c"))
    server.start()
    lose_host(actors, "b")
    server.start()
    assert server.url == "http://10.0.0.3:20007"


def test_where_there_is_no_other_host_the_loss_is_said(server, actors):
    lose_host(actors, "b")
    with pytest.raises(HostLostError, match=r"10\.0\.0\.2: gone"):
        server.start()


def test_what_would_never_answer_is_not_waited_for_when_this_host_has_left_the_cluster(monkeypatch):
    """As where its node dies while an actor starts on another host."""
    context = SimpleNamespace(get_node_id=lambda: "here")
    asked = SimpleNamespace(
        wait=lambda calls, timeout: ([], calls),
        nodes=list,
        get_runtime_context=lambda: context,
    )
    errors = SimpleNamespace(RayError=KeyError, RayTaskError=KeyError)
    monkeypatch.setitem(sys.modules, "ray", asked)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
    with pytest.raises(EngineError, match="this host's node has left the Ray cluster"):
        engine_host._result("a call", 3600.0)


def test_a_server_is_the_controllers_own_where_its_spec_names_no_host(actors):
    here = SimpleNamespace(node="", host="h")
    assert isinstance(make_server(on("b"), 0, LOG, elsewhere=nowhere), PlacedServer)
    assert isinstance(make_server(here, 0, LOG, elsewhere=nowhere), Server)


def test_what_needs_the_process_is_asked_of_the_host():
    """Everything else of a server is waiting for HTTP, which the controller does itself."""
    public = {name for name in vars(EngineServer) if not name.startswith("_")}
    assert public - vars(PlacedServer).keys() == {"url", "wait_until_healthy"}
