"""Which call a server answers to which key, for every route that SGLang has."""

import asyncio
import json

import pytest

from sglang_patches import generate_each
from sglang_patches.who_may_ask import (
    BELOW_CLIENTS,
    OF_CLIENTS,
    OF_RUNS,
    OPEN,
    _Guard,
    _without_secrets,
)  # fmt: skip

RUNS, CLIENTS = "key-of-runs", "key-of-clients"


@pytest.fixture(scope="module")
def app():
    """SGLang's own application, with all its routes, ours too, and none of its processes."""
    from sglang.srt.entrypoints.http_server import app

    before = [*app.router.routes]
    generate_each._add_route()
    yield app
    app.router.routes[:] = before


def ask(app, path, key=None, method="POST", kind="http", keys=(RUNS, CLIENTS), **headers):
    """(HTTP status, error message) of a call; 200 where the guard hands it on."""
    sent = []

    async def answered(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    scope = {
        "type": kind, "method": method, "path": path, "raw_path": path.encode(), "root_path": "",
        "query_string": b"", "scheme": "http", "server": ("127.0.0.1", 1),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
    }  # fmt: skip
    guard = _Guard(
        answered, routes=lambda: app.router.routes, key_of_runs=keys[0], key_of_clients=keys[1]
    )
    asyncio.run(guard(scope, None, send))
    if sent[0]["type"] == "websocket.close":
        return 403, ""
    body = sent[1]["body"] if len(sent) > 1 else b"{}"
    return sent[0]["status"], json.loads(body).get("error", {}).get("message", "")


def flat(routes):
    """Every route, those of included routers too."""
    for route in routes:
        included = getattr(route, "original_router", None)
        yield from flat(included.routes) if included else [route]


def calls(app):
    """(path that one may ask, method, the route's own path, kind of call) of every route."""
    for route in flat(app.router.routes):
        methods = getattr(route, "methods", None) or {"GET"}
        kind = "http" if hasattr(route, "methods") else "websocket"
        filled = route.path.replace("{model:path}", "m").replace("{response_id}", "r")
        for method in sorted(methods - {"HEAD"}):
            yield filled, method, route.path, kind


def test_every_call_that_a_run_or_a_client_may_make_is_there_and_no_other_is_answered(app):
    there = {path for _, _, path, _ in calls(app)}
    assert there >= OF_RUNS | OF_CLIENTS | {"/configure_logging", "/scale_elastic_ep"}
    for path, method, route, kind in calls(app):
        asked = {"method": method, "kind": kind}
        status = [ask(app, path, key, **asked)[0] for key in (None, CLIENTS, RUNS)]
        if route in OPEN:
            assert status == [200, 200, 200], route
        elif route in OF_CLIENTS or route.startswith(BELOW_CLIENTS):
            assert status == [401 if kind == "http" else 403, 200, 200], route
        elif route in OF_RUNS:
            assert status == [401, 403, 200], route
        else:
            assert status == [403, 403, 403], route


def test_no_call_is_for_clients_that_sglang_itself_keeps_for_an_administrator(app):
    guarded = {
        route.path for route in flat(app.router.routes) if hasattr(route.endpoint, "_auth_level")
    }
    assert len(guarded) > 30 and not guarded & (OF_CLIENTS | OPEN)
    assert guarded > OF_RUNS


def test_a_path_that_the_server_does_not_have_gets_its_404_from_who_has_a_key(app):
    assert [ask(app, "/v1/files", key)[0] for key in (None, CLIENTS)] == [401, 200]


def test_what_no_run_needs_is_refused_to_the_key_of_runs_too_with_the_reason(app):
    for path in ("/configure_logging", "/start_profile", "/get_weights_by_name", "/open_session"):
        methods = {method for asked, method, _, _ in calls(app) if asked == path}
        assert methods
        for method in methods:
            status, message = ask(app, path, RUNS, method)
            assert status == 403 and message.startswith(f"{path}: this server answers calls for")


def test_a_control_call_with_the_key_of_clients_is_told_whose_key_it_needs(app):
    status, message = ask(app, "/update_weights_from_disk", CLIENTS)
    assert status == 403 and "the key is that of clients" in message and "api_key" in message


@pytest.mark.parametrize("host", ["x/health", "x/health?", "x/metrics#", "127.0.0.1"])
def test_no_name_of_a_host_makes_a_call_one_that_needs_no_key(app, host):
    assert ask(app, "/update_weight_version", host=host)[0] == 401
    assert ask(app, "/health_or_not", host=host)[0] == 401


def test_a_key_is_taken_as_the_clients_of_both_protocols_send_it_and_no_other(app):
    path = "/v1/messages"
    assert ask(app, path, **{"x-api-key": CLIENTS})[0] == 200
    assert ask(app, path, authorization=f"bearer {CLIENTS}")[0] == 200
    for wrong in (CLIENTS, f"Basic {CLIENTS}", f"Bearer {CLIENTS}x", "Bearer ", "Bearer \xff"):
        assert ask(app, path, authorization=wrong)[0] == 401


def test_with_one_key_it_is_that_of_a_run_and_without_any_nobody_is_asked(app):
    one = {"keys": (RUNS, RUNS)}
    assert ask(app, "/flush_cache", RUNS, **one)[0] == ask(app, "/generate", RUNS, **one)[0] == 200
    assert ask(app, "/flush_cache", "", keys=("", ""))[0] == 200
    assert ask(app, "/start_profile", "", keys=("", ""))[0] == 403


def test_what_a_server_tells_of_itself_holds_no_key():
    secret = {"api_key": "A", "admin_api_key": "B", "ssl_keyfile_password": "C"}
    more = {
        "launch_command": ["--api-key=A"],
        "model_path": "/m",
        "api_key_of": None,
        "num_token": 3,
    }
    told = _without_secrets({**secret, **more, "internal_states": [{**secret, "load": {**more}}]})
    assert not any(f'"{text}' in json.dumps(told) for text in ("A", "B", "C", "--api-key"))
    assert told["model_path"] == "/m" and told["internal_states"][0]["load"]["num_token"] == 3
