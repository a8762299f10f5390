"""OpenAI's chat completions (https://platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from onpolicy.agents.gateway.calls import Call, Message, Reply
from onpolicy.agents.gateway.fields import (
    CREATED,
    SET_FOR_ALL,
    Fields,
    content_of,
    openai_choice,
    schema_in,
    text_of,
    usage,
)
from onpolicy.agents.gateway.protocols import Event
from onpolicy.agents.gateway.refusals import RefusedError, invalid

PATH = "/chat/completions"

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""The role of each message for templates, which know no developer."""

_LEFT_BY_CLIENTS = ("refusal", "audio", "function_call", "annotations")
"""Fields of an answer that clients send back, without content here."""

error = RefusedError.as_openai


def read(fields: Fields) -> Call:
    """Return the call in a request. Raises RefusedError."""
    form = fields.take("response_format", dict, {"type": "text"})
    fields.refuse("modalities", ["text"], because="the policy answers in text.")
    fields.refuse("top_logprobs", 0, because="only those of sampled tokens are known. Ask for 0.")
    fields.refuse("reasoning_effort", because=SET_FOR_ALL.format('"reasoning_effort": "low"'))
    fields.refuse("verbosity", because="nothing but the prompt says how much the policy says.")
    fields.refuse(
        "chat_template_kwargs", {}, because="--chat-template-kwargs sets them for all sessions."
    )
    tools = tuple(read_tool(tool) for tool in fields.objects("tools"))
    call = Call(
        model=fields.need("model", str),
        messages=read_messages(fields.objects("messages")),
        **openai_choice(fields, tools),
        num_answers=fields.count("n") or 1,
        max_tokens=fields.count("max_completion_tokens") or fields.count("max_tokens"),
        temperature=fields.temperature(),
        stop=fields.texts("stop"),
        json_schema=schema_in(Fields(form, "response_format"), "json_schema"),
        streams=fields.take("stream", bool, False),
        streams_usage=fields.streams_usage(),
        log_probs=fields.take("logprobs", bool, False),
        token_ids=fields.take("return_token_ids", bool, False),
    )
    fields.ignore("max_tokens")
    fields.end()
    return call


def read_tool(tool: Fields) -> dict[str, Any]:
    """Return a function with its fields in the order in which they were sent: templates print them."""
    kind, function = tool.need("type", str), tool.need("function", dict)
    if kind != "function":
        raise tool.invalid("type", f"{kind!r}: the policy calls functions alone.")
    Fields(function, tool.name("function")).need("name", str)
    return {"type": kind, "function": function}


def read_messages(given: Sequence[Fields]) -> tuple[Message, ...]:
    """Return messages in the form that chat templates read."""
    if not given:
        raise invalid("messages", "must be a list of at least one message.")
    return tuple(_read_message(message) for message in given)


def _read_message(fields: Fields) -> Message:
    role = fields.need("role", str)
    if role not in _ROLES:
        raise fields.invalid("role", f"{role!r} is none of {', '.join(_ROLES)}.")
    message: dict[str, Any] = {"role": _ROLES[role]}
    read_content = text_of if role == "assistant" else content_of
    message["content"] = read_content(fields.pop("content"), fields.name("content"))
    if name := fields.find("name", str):
        message["name"] = name
    if role == "tool":
        message["tool_call_id"] = fields.need("tool_call_id", str)
    if role == "assistant":
        reasoning = fields.find("reasoning_content", str) or fields.find("reasoning", str)
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls := fields.objects("tool_calls"):
            message["tool_calls"] = [_read_tool_call(call) for call in calls]
        for field in _LEFT_BY_CLIENTS:
            fields.refuse(field, [], because="the policy answers in text and tool calls.")
        fields.ignore("reasoning", "reasoning_content")
    fields.end()
    return message


def _read_tool_call(call: Fields) -> dict[str, Any]:
    call.ignore("index")
    kind = call.take("type", str, "function")
    function = Fields(call.need("function", dict), call.name("function"))
    found = {"name": function.need("name", str), "arguments": function.take("arguments", str, "")}
    return {"id": call.need("id", str), "type": kind, "function": found}


def answer(call: Call, replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the body of the response."""
    choices = [
        {
            "index": i,
            "message": {**reply.message, "refusal": None},
            "finish_reason": reply.ending,
            "logprobs": log_probs(reply) if call.log_probs else None,
            **({"token_ids": list(reply.token_ids)} if call.token_ids else {}),
        }
        for i, reply in enumerate(replies)
    ]
    body = {**_head(call, replies, "chat.completion"), "choices": choices, "usage": usage(replies)}
    return {**body, **({"prompt_token_ids": list(replies[0].prompt_ids)} if call.token_ids else {})}


def log_probs(reply: Reply) -> dict[str, Any]:
    """Return the log-probabilities of the sampled tokens, without alternatives."""
    return {
        "content": [
            {"token": text, "logprob": value, "bytes": list(part), "top_logprobs": []}
            for text, value, part in zip(
                reply.token_texts, reply.log_probs, reply.token_bytes, strict=True
            )
        ],
        "refusal": None,
    }


def events(call: Call, replies: Sequence[Reply]) -> Iterator[Event]:
    """Yield the response as a stream: a chunk for each part of an answer."""
    head = {**_head(call, replies, "chat.completion.chunk"), "usage": None}
    if not call.streams_usage:
        del head["usage"]
    for i, reply in enumerate(replies):
        for delta in _deltas(reply):
            choice = {"index": i, "delta": delta, "finish_reason": None, "logprobs": None}
            if call.log_probs and "role" in delta:
                choice["logprobs"] = log_probs(reply)
            yield "", {**head, "choices": [choice]}
        end = {"index": i, "delta": {}, "finish_reason": reply.ending, "logprobs": None}
        if call.token_ids:
            end["token_ids"] = list(reply.token_ids)
        yield "", {**head, "choices": [end]}
    if call.streams_usage:
        yield "", {**head, "choices": [], "usage": usage(replies)}
    yield "", "[DONE]"


def _deltas(reply: Reply) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if reply.reasoning:
        yield {"reasoning_content": reply.reasoning}
    if reply.content:
        yield {"content": reply.content}
    for i, tool_call in enumerate(reply.message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": i, **tool_call}]}


def _head(call: Call, replies: Sequence[Reply], kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{replies[0].name}",
        "object": kind,
        "created": CREATED,
        "model": call.model,
        "system_fingerprint": None,
    }
