"""The head of a cluster that was joined: its end is noticed at once, and told in our own words."""

import socket
import subprocess
import sys
import threading

import psutil
import pytest

from onpolicy.cluster import ray_session
from tests.support.forked_processes import forked_processes
from tests.support.raylets import raylets


class Head:
    """Accepts connections at one port, as long as it is there."""

    def __init__(self, port=0):
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port, self.connections, self.came = (
            self._listener.getsockname()[1], [], threading.Event(),
        )  # fmt: skip
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                self.connections.append(self._listener.accept()[0])
            except OSError:
                return
            self.came.set()

    def drop(self):
        """Close what is connected, and stay."""
        self.came.clear()
        while self.connections:
            self.connections.pop().close()

    def end(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()


@pytest.fixture
def told(monkeypatch):
    """Begins to watch a head: (errors that were told, event of the first)."""
    monkeypatch.setattr(ray_session, "_SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(ray_session, "PATIENCE", 0.4)
    errors, is_told = [], threading.Event()

    def on_loss(error):
        errors.append(error)
        is_told.set()

    return errors, is_told, on_loss


def test_a_head_that_ends_is_told_once_with_its_address_and_what_to_do(told):
    errors, is_told, on_loss = told
    head = Head()
    address = f"127.0.0.1:{head.port}"
    with ray_session.watching(address, on_loss):
        assert head.came.wait(10)
        head.end()
        assert is_told.wait(10)
    (error,) = errors
    assert f"the head of the Ray cluster at {address} is gone" in str(error)
    assert "`ray start`" in str(error) and "--load" in str(error)


def test_a_head_that_closes_a_silent_connection_is_there_still(told):
    _, is_told, on_loss = told
    head = Head()
    with ray_session.watching(f"127.0.0.1:{head.port}", on_loss):
        for _ in range(3):
            assert head.came.wait(10)
            head.drop()
        assert head.came.wait(10)
        assert not is_told.wait(0.8)
    head.end()


def test_a_head_that_is_started_again_in_time_is_there_still(told, monkeypatch):
    errors, _, on_loss = told
    monkeypatch.setattr(ray_session, "PATIENCE", 60.0)
    head = Head()
    with ray_session.watching(f"127.0.0.1:{head.port}", on_loss):
        assert head.came.wait(10)
        head.end()
        again = Head(head.port)
        assert again.came.wait(10)
        assert not errors
    again.end()


def test_after_a_session_nothing_is_told(told):
    errors, is_told, on_loss = told
    head = Head()
    with ray_session.watching(f"127.0.0.1:{head.port}", on_loss):
        assert head.came.wait(10)
    head.end()
    assert not is_told.wait(0.8) and not errors


MEMBER = """
import sys, time
from onpolicy.compat.process import prepare_process
from onpolicy.cluster.ray_session import session
from onpolicy.config.groups import ClusterConfig
from onpolicy.system import ending

if __name__ == "__main__":
    prepare_process()
    try:
        with ending.heard(), session(ClusterConfig(ray_address=sys.argv[1])):
            print("joined", flush=True)
            time.sleep(600)
    except ending.Ended as ended:
        sys.exit(ended.code)
"""


@pytest.mark.long
def test_a_command_in_a_cluster_whose_head_is_killed_ends_with_its_own_words(tmp_path):
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    with raylets(1) as cluster, forked_processes():
        member = subprocess.Popen(
            [sys.executable, str(script), cluster.address],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            assert any("joined" in line for line in iter(member.stdout.readline, ""))
            of_node = psutil.Process(cluster.nodes[0]._process.pid).children(recursive=True)
            (gcs,) = (each for each in of_node if each.name() == "gcs_server")
            gcs.kill()
            said, _ = member.communicate(timeout=50)
        finally:
            member.kill()
    assert member.returncode == 1
    assert "EngineError: the head of the Ray cluster at 127.0.0.2:" in said, said[-2000:]
    assert "Failed to connect to GCS" not in said
