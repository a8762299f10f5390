"""Servers behind the actor of a host, which dies here. In Ray: tests/e2e/test_cluster.py."""

import inspect
import os
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
    found = {"b": Actor()}

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


@pytest.fixture
def server(actors):
    spec = SimpleNamespace(node="b", host="10.0.0.2")
    return PlacedServer(spec, 0, LOG)


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


def test_on_a_host_that_is_gone_nothing_can_be_started(server, actors):
    kill_actor(actors)
    del actors["b"]
    assert not server.is_running
    with pytest.raises(
        HostLostError, match=r"10\.0\.0\.2: the host has left .*--max-rank-restarts"
    ):
        server.start()


def test_a_server_is_the_controllers_own_where_its_spec_names_no_host(actors):
    assert isinstance(make_server(SimpleNamespace(node="b", host="h"), 0, LOG), PlacedServer)
    assert isinstance(make_server(SimpleNamespace(node="", host="h"), 0, LOG), Server)


def test_what_needs_the_process_is_asked_of_the_host():
    """Everything else of a server is waiting for HTTP, which the controller does itself."""
    public = {name for name in vars(EngineServer) if not name.startswith("_")}
    assert public - vars(PlacedServer).keys() == {"url", "wait_until_healthy"}
    theirs = {name for name, _ in inspect.getmembers(EngineHost, inspect.isfunction)}
    assert theirs - {"__init__", "add"} == public - {"url", "wait_until_healthy"}
