"""Anthropic's messages (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from onpolicy.agents.gateway.calls import Call, Message, Reply
from onpolicy.agents.gateway.fields import (
    SET_FOR_ALL,
    Fields,
    anthropic_choice,
    content_of,
    content_part,
    function_tool,
    joined,
    text_of,
)
from onpolicy.agents.gateway.protocols import Event
from onpolicy.agents.gateway.refusals import RefusedError, invalid

PATH = "/messages"

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

error = RefusedError.as_anthropic


def read(fields: Fields) -> Call:
    """Return the call in a request. Raises RefusedError."""
    fields.ignore("cache_control")
    fields.refuse(
        "thinking", {"type": "disabled"}, because=SET_FOR_ALL.format('"enable_thinking": true')
    )
    for field in (
        "container",
        "mcp_servers",
        "context_management",
        "output_config",
        "output_format",
    ):
        fields.refuse(field, [], because="the run has none.")
    tools = tuple(_read_tool(tool) for tool in fields.objects("tools"))
    given = fields.objects("messages")
    if not given:
        raise invalid("messages", "must be a list of at least one message.")
    system = text_of(_without_cache(fields.pop("system")), "system")
    messages = [message for each in given for message in _read_message(each)]
    call = Call(
        model=fields.need("model", str),
        messages=(*([{"role": "system", "content": system}] if system else []), *messages),
        **anthropic_choice(fields, tools),
        max_tokens=fields.count("max_tokens"),
        temperature=fields.temperature(),
        stop=fields.texts("stop_sequences"),
        streams=fields.take("stream", bool, False),
    )
    if call.max_tokens is None:
        raise invalid("max_tokens", "is missing: it must be an integer.")
    fields.end()
    return call


def read_counted(fields: Fields) -> Call:
    """Return the call whose tokens are to be counted. Raises RefusedError."""
    if fields.count("max_tokens") is not None:
        raise invalid("max_tokens", "nothing is sampled where tokens are counted. Leave it out.")
    return read(fields.with_field("max_tokens", 1))


def _without_cache(content: Any) -> Any:
    """Return content without the cache marks and citations."""
    if not isinstance(content, list):
        return content
    return [
        {name: value for name, value in part.items() if name not in ("cache_control", "citations")}
        if isinstance(part, dict)
        else part
        for part in content
    ]


def _read_tool(tool: Fields) -> dict[str, Any]:
    kind = tool.take("type", str, "custom")
    if kind != "custom":
        raise tool.invalid("type", f"{kind!r}: the policy calls the client's functions alone.")
    return function_tool(
        tool.need("name", str), tool.find("description", str), tool.need("input_schema", dict)
    )


def _read_message(fields: Fields) -> list[Message]:
    """Return a message in the template's form; one with tool results becomes several."""
    role, content = fields.need("role", str), _without_cache(fields.pop("content"))
    if role not in ("user", "assistant"):
        raise fields.invalid("role", f"{role!r} is neither user nor assistant.")
    fields.end()
    where = fields.name("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise invalid(where, f"must be text or a list of blocks, and is {content!r:.80}.")
    blocks = [Fields(block, f"{where}[{i}]") for i, block in enumerate(content)]
    return [_of_assistant(blocks)] if role == "assistant" else _of_user(blocks)


def _of_assistant(blocks: Sequence[Fields]) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for block in blocks:
        match block.need("type", str):
            case "text":
                message["content"] += block.need("text", str)
            case "thinking":
                message["reasoning_content"] = block.need("thinking", str)
            case "tool_use":
                function = {
                    "name": block.need("name", str),
                    "arguments": json.dumps(block.take("input", dict, {})),
                }
                calls.append(
                    {"id": block.need("id", str), "type": "function", "function": function}
                )
            case kind:
                raise block.invalid("type", f"{kind!r}: the policy has never said such a block.")
    return {**message, **({"tool_calls": calls} if calls else {})}


def _of_user(blocks: Sequence[Fields]) -> list[Message]:
    messages, parts = list[Message](), list[dict[str, Any]]()
    for block in blocks:
        if (kind := block.need("type", str)) == "tool_result":
            content = content_of(_without_cache(block.pop("content")), block.name("content"))
            called = block.need("tool_use_id", str)
            messages.append({"role": "tool", "tool_call_id": called, "content": content})
        elif kind in ("text", "image"):
            parts.append(content_part(block.with_field("type", kind)))
        else:
            raise block.invalid("type", f"{kind!r}: the policy reads text and tool_result alone.")
    content = joined(parts)
    return [*messages, *([{"role": "user", "content": content}] if content else [])]


def answer(call: Call, replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the body of the response."""
    (reply,) = replies
    return {**_head(call, reply), "content": _blocks(reply), **_end(reply), "usage": _usage(reply)}


def events(call: Call, replies: Sequence[Reply]) -> Iterator[Event]:
    """Yield the response as a stream: one delta for each block."""
    (reply,) = replies
    usage = {**_usage(reply), "output_tokens": 0}
    start = {**_head(call, reply), "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message={**start, "usage": usage})
    for i, block in enumerate(_blocks(reply)):
        empty, delta = _delta(block)
        yield _event("content_block_start", index=i, content_block=empty)
        yield _event("content_block_delta", index=i, delta=delta)
        yield _event("content_block_stop", index=i)
    yield _event("message_delta", delta=_end(reply), usage=_usage(reply))
    yield _event("message_stop")


def _event(kind: str, **fields: Any) -> Event:
    return kind, {"type": kind, **fields}


def _delta(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an empty block, and the delta that fills it."""
    match block["type"]:
        case "thinking":
            return {**block, "thinking": ""}, {
                "type": "thinking_delta",
                "thinking": block["thinking"],
            }
        case "tool_use":
            text = json.dumps(block["input"])
            return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": text}
    return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content or not reply.tool_calls:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        given = json.loads(call.arguments or "{}")
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


def _head(call: Call, reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.name}", "type": "message", "role": "assistant", "model": call.model}


def _end(reply: Reply) -> dict[str, Any]:
    if reply.stopped_by:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
    return {"stop_reason": _STOP_REASONS[reply.ending], "stop_sequence": None}


def _usage(reply: Reply) -> dict[str, int]:
    return {"input_tokens": len(reply.prompt_ids), "output_tokens": len(reply.token_ids)}
