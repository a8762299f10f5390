"""Servers of every kind, real ones: what answers at --rollout-server-url is told apart."""

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from onpolicy.config.groups import EngineConfig
from onpolicy.errors import ConfigError
from onpolicy.rollout.server import require_addresses, require_place


@pytest.fixture
def url():
    """A server that answers every request alike: (status, body) to its URL."""
    servers = []

    def start(status, body):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                key = self.headers.get("Authorization")
                self.send_response(403 if status == "client's" and "weight" in self.path else
                                   200 if status in ("key", "client's") and key == "Bearer good" else
                                   401 if status == "key" else status)  # fmt: skip
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


INFO = json.dumps({"internal_states": [{}]}).encode()


def check(url, key=""):
    require_addresses(EngineConfig(rollout_server_url=(url,), rollout_api_key=key), key)


def test_an_sglang_server_is_found(url):
    check(url(200, INFO))
    check(url("key", INFO) + "/", "good")


@pytest.mark.parametrize(
    ("answer", "key", "message"),
    [
        (("key", INFO), "", "asks for an --rollout-api-key"),
        (("key", INFO), "bad", "refuses --rollout-api-key"),
        ((404, b""), "", "is no SGLang server"),
        ((500, INFO), "", "is no SGLang server"),
        ((200, b"<html>"), "", "is no SGLang server"),
        ((200, b"[]"), "", "is no SGLang server"),
        ((200, b'{"internal_states": 3}'), "", "is no SGLang server"),
    ],
)
def test_anything_else_is_named(url, answer, key, message):
    with pytest.raises(ConfigError, match=rf"--rollout-server-url=http.*: .*{message}"):
        check(url(*answer), key)


def test_what_hangs_up_is_nobody():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=r"nothing answers there .*Connection refused"):
            check(f"http://127.0.0.1:{port}")


def listens_after_a_free_port():
    """A socket; others may have the port before that of the first one."""
    while True:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.socket() as before, contextlib.suppress(OSError):
            before.bind(("127.0.0.1", listener.getsockname()[1] - 1))
            return listener
        listener.close()


def test_every_port_of_a_run_must_be_free():
    with listens_after_a_free_port() as listener:
        port = listener.getsockname()[1]
        require_place("127.0.0.1", 0)
        with pytest.raises(ConfigError, match=rf"--rollout-base-port: port {port} on 127.0.0.1"):
            require_place("127.0.0.1", port - 1, 2)


def test_the_key_of_clients_is_told_from_that_of_runs_before_a_run_starts(url):
    with pytest.raises(ConfigError, match=r"--rollout-api-key=.*takes it for the key of clients"):
        check(url("client's", INFO), "good")
