"""Requests with which agent libraries force a call are answered with one that their schemas allow."""

import json
from functools import cache

import aiohttp
import jsonschema
import pytest
import xgrammar

from onpolicy.agents.gateway.gateway_server import Gateway
from onpolicy.agents.gateway.parsing import AnswerParser
from onpolicy.agents.gateway.session import SessionRules
from onpolicy.rollout.rollouter import Episode
from onpolicy.types import SamplingParams
from tests.support.acting import STOP, Draws, SpelledOut, roll_out

SIZE = 128
"""Tokens: characters of ASCII."""

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4000, stop_token_ids=(STOP,))


@cache
def compiler():
    texts = ["<stop>", *map(chr, range(1, SIZE))]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(texts, stop_token_ids=[STOP]))


def drawn(structural_tag, chance):
    """A text within a grammar, drawn character by character; the shortest endings are likely."""
    matcher = xgrammar.GrammarMatcher(compiler().compile_structural_tag(structural_tag))
    mask, text = xgrammar.allocate_token_bitmask(1, SIZE), ""
    while True:
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [token for token in range(SIZE) if words[token >> 5] >> (token & 31) & 1]
        if STOP in allowed:
            return text
        weights = [50 if chr(t) in '"}]' else 1 if chr(t).isalnum() else 0.02 for t in allowed]
        (token,) = chance.choices(allowed, weights)
        assert matcher.accept_token(token)
        text += chr(token)


class Within(Draws):
    """Answers whatever the grammar of a request allows, and `free` without a grammar."""

    def _answer(self, branch, ask):
        self.grammar = branch.episode.request(branch, ask).params.grammar
        super()._answer(branch, ask)

    def text(self, chance):
        return "free" if self.grammar is None else drawn(self.grammar.text, chance)


def asked(path, *bodies):
    """The answers to requests of one session."""
    answers = []

    async def act(prompt, turns):
        parser = AnswerParser(tool_call_parser="qwen25")
        gateway = Gateway(SessionRules(template=SpelledOut(), parser=parser))
        opened = await gateway.open(turns)
        headers = {"Authorization": f"Bearer {opened.api_key}"}
        try:
            async with aiohttp.ClientSession(opened.base_url + "/", headers=headers) as client:
                for body in bodies:
                    async with client.post(path, json={"model": "policy", **body}) as response:
                        answers.append(await response.text())
                        assert response.status == 200, answers
        finally:
            branches = await gateway.end(opened)
            await gateway.close()
        return Episode(trajectories=branches, reward=1.0)

    roll_out(act, Within(), params=PARAMS, holds_grammars=lambda: True)
    return answers


def closed(properties, required, **more):
    """A JSON schema of an object."""
    return {"type": "object", "properties": properties, "required": required, **more}


def tool(name, parameters, **more):
    function = {"name": name, "description": f"About {name}.", "parameters": parameters, **more}
    return {"type": "function", "function": function}


def flat(chat_tool):
    """A tool as /responses has it."""
    return {"type": "function", **chat_tool["function"]}


INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
STREET = closed({"street": TEXT, "number": {"type": "integer", "minimum": 1}}, ["street", "number"])
NESTED = closed(
    {
        "name": TEXT,
        "home": {"anyOf": [{"$ref": "#/$defs/Street"}, {"type": "null"}], "default": None},
        "tags": {"type": "array", "items": TEXT, "default": []},
    },
    ["name", "home"],
    **{"$defs": {"Street": STREET}},
)
ADD = tool("add", closed({"a": INTEGER, "b": INTEGER}, ["a", "b"]))
STRICT = tool("add", closed({"a": INTEGER}, ["a"], additionalProperties=False), strict=True)
ANSWER = tool("final_answer", closed({"answer": TEXT}, ["answer"]))
RESULT, PERSON = tool("final_result", NESTED), tool("Person", NESTED)

USER = {"role": "user", "content": "Who is it?"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
NAMED = {"type": "function", "function": {"name": "Person"}}


def parts(text):
    return [{"type": "text", "text": text}]


SMOLAGENTS = {
    "messages": [
        {"role": "system", "content": parts("Call tools.")},
        {"role": "user", "content": parts("How much?")},
        {"role": "assistant", "content": parts("Calling tools:\n[{'id': 'c1'}]")},
        {"role": "user", "content": parts("Observation:\n3")},
    ],
    "stop": ["Observation:", "Calling tools:"],
    "tool_choice": "required",
    "tools": [ADD, ANSWER],
}
PYDANTIC_AI = {
    "messages": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ],
    "stream": False,
    "tool_choice": "required",
    "tools": [STRICT, RESULT],
}
INSTRUCTOR = {
    "messages": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c1", "name": "Person", "content": "Correct it."},
    ],
    "tool_choice": NAMED,
    "tools": [PERSON],
}
LANGCHAIN = {"messages": [USER], "stream": False, "tool_choice": "required", "tools": [ADD, PERSON]}
LANGCHAIN_ONE = {**LANGCHAIN, "parallel_tool_calls": False, "tool_choice": NAMED}

PYDANTIC_AI_RESPONSES = {
    "input": [
        USER,
        {"name": "add", "arguments": '{"a": 1}', "call_id": "c1", "type": "function_call"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ],
    "stream": False,
    "tool_choice": "required",
    "tools": [flat(STRICT), {**flat(RESULT), "strict": False}],
}
INSTRUCTOR_RESPONSES = {
    "input": [USER],
    "text": {"format": {"type": "json_schema", "name": "Person", "strict": True, "schema": NESTED}},
    "tool_choice": {"type": "function", "name": "Person"},
    "tools": [flat(PERSON)],
}
LANGCHAIN_RESPONSES = {
    "input": [{**USER, "type": "message"}], "parallel_tool_calls": False, "stream": False,
    "tool_choice": {"type": "function", "name": "Person"}, "tools": [flat(ADD), flat(PERSON)],
}  # fmt: skip

CHAT = {
    "smolagents": SMOLAGENTS, "pydantic-ai": PYDANTIC_AI, "instructor": INSTRUCTOR,
    "langchain-any": LANGCHAIN, "langchain-structured": LANGCHAIN_ONE,
}  # fmt: skip
RESPONSES = {
    "pydantic-ai": PYDANTIC_AI_RESPONSES,
    "instructor": INSTRUCTOR_RESPONSES,
    "langchain": LANGCHAIN_RESPONSES,
}


def events(text):
    """The events of a stream."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def require_allowed(calls, tools):
    """At least one call, each with arguments that its tool's schema allows."""
    schemas = {each["name"]: each["parameters"] for each in tools}
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])


@pytest.mark.parametrize("library", CHAT)
def test_a_chat_completion_calls_a_tool_as_the_library_forces_it(library):
    body = CHAT[library]
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    whole, stream = asked("chat/completions", body, {**body, **streams})
    choice = json.loads(whole)["choices"][0]
    chunks = [each for event in events(stream) for each in event["choices"]]
    deltas = [call for each in chunks for call in each["delta"].get("tool_calls", ())]
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == ""
    allowed = [each["function"] for each in body["tools"]]
    if body["tool_choice"] == NAMED:
        allowed = [each for each in allowed if each["name"] == "Person"]
    for calls in (choice["message"]["tool_calls"], deltas):
        require_allowed([each["function"] for each in calls], allowed)
        assert len(calls) == 1 or body.get("parallel_tool_calls", True)


@pytest.mark.parametrize("library", RESPONSES)
def test_a_response_calls_a_tool_as_the_library_forces_it(library):
    body = RESPONSES[library]
    whole, stream = asked("responses", body, {**body, "stream": True})
    for response in (json.loads(whole), events(stream)[-1]["response"]):
        assert {item["type"] for item in response["output"]} == {"function_call"}
        require_allowed(response["output"], body["tools"])
        if body["tool_choice"] != "required":
            assert [item["name"] for item in response["output"]] == ["Person"]


def test_without_its_choice_a_request_is_answered_as_the_policy_likes():
    for library, body in CHAT.items():
        (whole,) = asked("chat/completions", {**body, "tool_choice": "none"})
        assert json.loads(whole)["choices"][0]["message"]["content"] == "free", library
