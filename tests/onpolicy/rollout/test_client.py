"""What a client says to a server of adapters under names, and which servers it refuses."""

import asyncio
from unittest.mock import MagicMock

import aiohttp
import pytest

from onpolicy.errors import ConfigError
from onpolicy.rollout.client import EngineClient, EngineLostError, _payload
from onpolicy.types import Request, SamplingParams

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=2, stop_token_ids=())
REQUEST = Request(prompt_ids=[7], sampling_seed=1, params=PARAMS)


def client_named(name):
    return EngineClient("http://e", "", 1800.0, 60.0, "", name)


def test_what_is_pushed_and_asked_under_a_name_says_it(monkeypatch):
    said = []

    class Answer:
        ok, text = True, ""

        def json(self):
            return {}

    client = client_named("math")
    monkeypatch.setattr(client, "_call", lambda *_, json: said.append(json) or Answer())
    client.post("/update_weights_from_tensor", {"weight_version": "3"})
    client.flush_cache()  # asks nothing: pushes of a name are apart
    assert said == [{"weight_version": "math:3"}]
    assert _payload(REQUEST, "math")["lora_path"] == "math" and "lora_path" not in _payload(REQUEST)
    assert client.patience(0) == 1860 and client_named("").patience(0) == 60


def test_requests_say_the_one_adapter_of_a_stock_server_and_pushes_do_not(monkeypatch):
    session, client = MagicMock(), EngineClient("http://e", "", 1.0, 1.0, served_adapter="mine")
    session.post.side_effect = aiohttp.ClientConnectorError(MagicMock(), OSError())
    with pytest.raises(EngineLostError):
        asyncio.run(client.generate(session, REQUEST))
    assert session.post.call_args.kwargs["json"]["requests"][0]["lora_path"] == "mine"
    assert client.adapter_name == "" and client.patience(0) == 1


@pytest.mark.parametrize(
    ("name", "body"), [("a", {"rid": "/a"}), ("", {"rid": "", "abort_all": True})]
)
def test_what_is_aborted_is_what_is_sampled_under_the_name(name, body):
    session = MagicMock()
    asyncio.run(client_named(name).abort(session))
    assert session.post.call_args.kwargs["json"] == body


@pytest.mark.parametrize(
    ("name", "held", "rule"),
    [
        ("c", {"a": "1", "b": "2"}, "has adapters named a, b, and the run is --lora-name=c"),
        ("", {"a": "1"}, "has adapters named a, and the run is without --lora-name"),
        ("a", "1", "has one set of weights without a name, and the run is --lora-name=a"),
    ],
)
def test_a_server_without_a_runs_name_is_refused(name, held, rule):
    with pytest.raises(ConfigError, match=rule):
        client_named(name)._own_weights(held)


def test_a_run_proves_the_weights_of_its_own_name():
    assert client_named("b")._own_weights({"a": "1", "b": "2"}) == "2"
    assert client_named("")._own_weights("3") == "3"
