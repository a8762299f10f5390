"""Requests to a server: refused where the answer would not be what was asked for, and given seeds."""

from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest

from sglang_patches.requests import SeedGiver, _refuse_format_beside_tools

FORM = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
FUNCTION = {"name": "add", "parameters": {}}
TOOLS = [{"type": "function", "function": FUNCTION}]


def chat(**asked):
    nested = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM["schema"]}}
    asked = {"response_format": nested, "tools": TOOLS, **asked}
    return ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], model="m", **asked)


def response(**asked):
    asked = {"text": {"format": FORM}, "tools": [{"type": "function", **FUNCTION}], **asked}
    return ResponsesRequest(input="hi", model="m", **asked)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (chat(), "response_format.type=json_schema beside tools"),
        (chat(response_format={"type": "json_object"}), "response_format.type=json_object"),
        (chat(response_format=None, regex="a+"), "regex beside tools"),
        (response(), "text.format.type=json_schema beside tools"),
    ],
)
def test_a_format_that_would_keep_an_answer_from_calling_a_tool_is_refused(request_, field):
    with pytest.raises(ValueError, match=field):
        _refuse_format_beside_tools(request_)


@pytest.mark.parametrize("make", [chat, response])
def test_a_format_without_tools_that_may_be_called_is_taken(make):
    _refuse_format_beside_tools(make(tools=[]))
    _refuse_format_beside_tools(make(tool_choice="none"))


def test_tools_without_a_format_are_taken():
    _refuse_format_beside_tools(chat(response_format=None))
    _refuse_format_beside_tools(response(text=None))


def ask(giver, server_seed=0, seed=None, top_k=1 << 30):
    params = SimpleNamespace(sampling_seed=seed, top_k=top_k)
    manager = SimpleNamespace(server_args=SimpleNamespace(random_seed=server_seed))
    giver(SimpleNamespace(sampling_params=params), manager)
    return params.sampling_seed


def test_every_request_without_a_seed_gets_another_one_that_the_engine_can_take():
    giver = SeedGiver()
    seeds = [ask(giver) for _ in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_a_server_that_is_asked_again_in_the_same_order_gives_the_same_ones():
    first, second, other = SeedGiver(), SeedGiver(), SeedGiver()
    ours = [ask(first) for _ in range(5)]
    assert ours == [ask(second) for _ in range(5)]
    assert not set(ours) & {ask(other, server_seed=1) for _ in range(5)}


def test_neither_a_seed_that_was_given_nor_a_health_check_takes_one():
    first, second = SeedGiver(), SeedGiver()
    assert ask(first, seed=7) == 7
    assert ask(first, top_k=1) is None
    assert ask(first) == ask(second)
