"""Nothing between a run's own processes goes by a proxy, by a real one that is listened for."""

import asyncio
import json
import os
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import aiohttp
import httpx
import pytest
import requests

from onpolicy.compat.process import prepare_process
from onpolicy.config.groups import EngineConfig
from onpolicy.rollout.client import EngineClient
from onpolicy.rollout.engine_args import engine_environment
from onpolicy.rollout.server import EngineServer, require_addresses
from onpolicy.system.network import proxy_exceptions
from tests.onpolicy.rollout.test_engine_args import ALIGNED, spec_of
from tests.support.proxies import EXCEPTIONS, recording_proxy

KEY = "only-for-the-engine"


@pytest.fixture
def engine():
    """The URL of a server that answers what the engine's clients ask; it wants the key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            has_key = self.headers.get("Authorization") == f"Bearer {KEY}"
            body = json.dumps({"internal_states": [{"onpolicy": {}}]}).encode()
            self.send_response(200 if has_key else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def proxy(monkeypatch, tmp_path):
    """What a proxy is sent that the environment names for everything; ~/.netrc has another password."""
    with recording_proxy() as (environment, seen):
        for name in EXCEPTIONS:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "netrc").write_text("default login somebody password else\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        yield seen


def test_a_runs_own_requests_reach_its_engine_and_no_proxy(engine, proxy):
    url = f"http://127.0.0.1:{engine.server_port}"
    client = EngineClient(url, KEY, 10.0, 10.0)
    client.report()
    client.post("/begin_weight_update", {})
    client.flush_cache()
    require_addresses(EngineConfig(rollout_server_url=(url,), rollout_api_key=KEY), KEY)
    server = EngineServer(spec_of(ALIGNED, api_key=KEY), 0, None)
    server.port, server._process = engine.server_port, SimpleNamespace(poll=lambda: None)
    server.wait_until_healthy(10)

    async def health():
        async with aiohttp.ClientSession() as session:
            return await client.is_healthy(session)

    assert asyncio.run(health())
    assert proxy == []


LIBRARIES = {
    "requests": requests.get,
    "httpx": httpx.get,
    "urllib": lambda url, timeout: urllib.request.build_opener().open(url, timeout=timeout),
}


@pytest.mark.parametrize("ask", LIBRARIES.values(), ids=LIBRARIES)
@pytest.mark.parametrize("of", ["a process of a run", "a server's process", "nobody"])
def test_libraries_that_read_the_environment_find_no_proxy_for_this_host(
    engine, proxy, monkeypatch, ask, of
):
    """SGLang's warm-up and clients of the gateway are such; a process of nobody's is the control."""
    for name in EXCEPTIONS:  # so that monkeypatch puts them back
        monkeypatch.setenv(name, os.environ.get(name, ""))
    if of == "a process of a run":
        prepare_process()
    elif of == "a server's process":
        os.environ.update(engine_environment(spec_of(ALIGNED)))
    for host in ("127.0.0.1", "localhost"):
        try:
            ask(f"http://{host}:{engine.server_port}/health", timeout=10)
        except OSError as error:  # urllib raises what it is answered
            assert "401" in str(error) or of == "nobody"
    assert bool(proxy) == (of == "nobody")


def test_hosts_that_the_environment_excepts_stay_excepted():
    given = {"no_proxy": "a.example, .b", "NO_PROXY": "c.example"}
    kept, added = "a.example,.b,c.example", "127.0.0.1,localhost,::1,10.0.0.7"
    assert {*proxy_exceptions(given, "10.0.0.7").values()} == {f"{kept},{added}"}
    assert {*proxy_exceptions({"NO_PROXY": "*"}).values()} == {"*"}
    twice = proxy_exceptions(proxy_exceptions(given))
    assert twice == proxy_exceptions(given)
