"""OpenAI's responses (https://platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from typing import Any

from onpolicy.agents.gateway.calls import Call, Message, Reply
from onpolicy.agents.gateway.fields import (
    CREATED,
    SET_FOR_ALL,
    Fields,
    content_of,
    function_tool,
    openai_choice,
    schema_in,
    text_of,
    usage,
)
from onpolicy.agents.gateway.protocols import Event
from onpolicy.agents.gateway.protocols.chat_completions import log_probs
from onpolicy.agents.gateway.refusals import RefusedError, invalid

PATH = "/responses"

_TEXT = ("input_text", "output_text", "text", "reasoning_text")
_LOG_PROBS, _PACKED = "message.output_text.logprobs", "reasoning.encrypted_content"
_INCLUDED = (_LOG_PROBS, _PACKED)
"""Optional contents of an answer. Reasoning is packed for clients that return it in no other form;
it is not secret here."""

error = RefusedError.as_openai


def read(fields: Fields) -> Call:
    """Return the call in a request. Raises RefusedError."""
    text = Fields(fields.take("text", dict, {}), "text")
    form = text.take("format", dict, {"type": "text"})
    text.refuse("verbosity", because="nothing but the prompt says how much the policy says.")
    text.end()
    reasoning = Fields(fields.take("reasoning", dict, {}), "reasoning")
    reasoning.refuse("effort", because=SET_FOR_ALL.format('"reasoning_effort": "low"'))
    for field in ("summary", "generate_summary"):
        reasoning.refuse(field, because="reasoning is answered whole. Leave it out.")
    reasoning.end()
    fields.refuse("top_logprobs", 0, because="only those of sampled tokens are known. Ask for 0.")
    fields.refuse("truncation", "disabled", because="a prompt is read whole.")
    fields.refuse(
        "background", False, because="an answer is given to the client that waits for it."
    )
    include = fields.take("include", list, [])
    for asked in include:
        if asked not in _INCLUDED:
            raise invalid("include", f"{asked!r}: answers have {' and '.join(_INCLUDED)} alone.")
    tools = tuple(_read_tool(tool) for tool in fields.objects("tools"))
    system = fields.take("instructions", str, "")
    before = [{"role": "system", "content": system}] if system else []
    call = Call(
        model=fields.need("model", str),
        continues=fields.take("previous_response_id", str, "").removeprefix("resp_"),
        messages=(*before, *_read_input(fields)),
        **openai_choice(fields, tools),
        max_tokens=fields.count("max_output_tokens"),
        temperature=fields.temperature(),
        json_schema=schema_in(Fields(form, "text.format")),
        streams=fields.take("stream", bool, False),
        log_probs=_LOG_PROBS in include,
        packs_reasoning=_PACKED in include,
    )
    fields.ignore("stream_options")
    fields.end()
    return call


def _read_tool(tool: Fields) -> dict[str, Any]:
    if (kind := tool.need("type", str)) != "function":
        raise tool.invalid("type", f"{kind!r}: the policy calls the client's functions alone.")
    return function_tool(
        tool.need("name", str), tool.find("description", str), tool.find("parameters", dict)
    )


def _read_input(fields: Fields) -> list[Message]:
    given = fields.pop("input")
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise invalid("input", f"must be a text or a list of items, and is {given!r:.80}.")
    messages = list[dict[str, Any]]()
    for i, item in enumerate(given):
        _add_item(messages, Fields(item, f"input[{i}]"))
    return list(messages)


def _add_item(messages: list[dict[str, Any]], item: Fields) -> None:
    """Add an item: an answer's reasoning, text and calls are items of one message."""
    match item.take("type", str, "message"):
        case "message":
            role, content = item.need("role", str), _texts_alone(item.pop("content"))
            if role == "assistant":
                text = text_of(content, item.name("content"), _TEXT)
                _open_answer(messages)["content"] += text
            elif role in ("system", "developer", "user"):
                said = content_of(content, item.name("content"), _TEXT)
                messages.append({"role": "user" if role == "user" else "system", "content": said})
            else:
                raise item.invalid("role", f"{role!r} is no role.")
        case "reasoning":
            parts = item.pop("content") or item.pop("summary")
            text = text_of(parts, item.name("content"), (*_TEXT, "summary_text"))
            text = text or _unpacked(item.take("encrypted_content", str, ""), item)
            _open_answer(messages, anew=True)["reasoning_content"] = text
        case "function_call":
            function = {"name": item.need("name", str), "arguments": item.need("arguments", str)}
            called = {"id": item.need("call_id", str), "type": "function", "function": function}
            _open_answer(messages).setdefault("tool_calls", []).append(called)
        case "function_call_output":
            output = content_of(item.pop("output"), item.name("output"), _TEXT)
            of_call = item.need("call_id", str)
            messages.append({"role": "tool", "tool_call_id": of_call, "content": output})
        case kind:
            raise item.invalid("type", f"{kind!r}: the policy reads no such item.")


def _unpacked(packed: str, item: Fields) -> str:
    try:
        return b64decode(packed, validate=True).decode()
    except ValueError as error:
        where = item.name("encrypted_content")
        raise invalid(where, "is none that was answered here. Give it back as it was.") from error


def _texts_alone(content: Any) -> Any:
    """Return content without the annotations and log-probabilities of answers."""
    if not isinstance(content, list):
        return content
    left_out = ("annotations", "logprobs")
    return [
        {name: value for name, value in part.items() if name not in left_out}
        if isinstance(part, dict)
        else part
        for part in content
    ]


def _open_answer(messages: list[dict[str, Any]], anew: bool = False) -> dict[str, Any]:
    if anew or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def answer(call: Call, replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the body of the response."""
    (reply,) = replies
    return _body(call, reply, "completed", _items(call, reply))


def _body(call: Call, reply: Reply, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    is_cut = reply.ending == "length" and status == "completed"
    counted = usage([reply])
    return {
        "id": f"resp_{reply.name}",
        "object": "response",
        "created_at": CREATED,
        "model": call.model,
        "status": "incomplete" if is_cut else status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": items,
        "parallel_tool_calls": not call.one_call,
        "previous_response_id": f"resp_{call.continues}" if call.continues else None,
        "temperature": call.temperature,
        "tool_choice": _said_choice(call),
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in call.tools],
        "top_p": None,
        "usage": {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        },
    }


def _said_choice(call: Call) -> Any:
    if call.named_tool:
        return {"type": "function", "name": call.named_tool}
    return "required" if call.forces_call else "auto"


def _items(call: Call, reply: Reply) -> list[dict[str, Any]]:
    items = list[dict[str, Any]]()
    if reply.reasoning:
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        item = {"id": f"rs_{reply.name}", "type": "reasoning", "summary": [], "content": content}
        if call.packs_reasoning:
            item["encrypted_content"] = b64encode(reply.reasoning.encode()).decode()
        items.append(item)
    if reply.content or not reply.tool_calls:
        sampled = log_probs(reply)["content"] if call.log_probs else []
        text = {"type": "output_text", "text": reply.content, "annotations": []}
        message = {"id": f"msg_{reply.name}", "type": "message", "role": "assistant"}
        parts = [{**text, "logprobs": sampled}]
        items.append({**message, "status": "completed", "content": parts})
    items += [
        {
            "id": f"fc_{reply.name}_{i}",
            "type": "function_call",
            "status": "completed",
            "call_id": tool_call.id,
            "name": tool_call.name,
            "arguments": tool_call.arguments,
        }
        for i, tool_call in enumerate(reply.tool_calls)
    ]
    return items


def events(call: Call, replies: Sequence[Reply]) -> Iterator[Event]:
    """Yield the response as a stream: one delta for each item."""
    (reply,) = replies
    whole = answer(call, replies)
    begun = _body(call, reply, "in_progress", [])
    last = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
    told: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        *(event for i, item in enumerate(whole["output"]) for event in _events_of(i, item)),
        {"type": last, "response": whole},
    ]
    for number, event in enumerate(told):
        yield event["type"], {**event, "sequence_number": number}


def _events_of(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    at = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "function_call":
        empty, arguments = {**item, "arguments": ""}, item["arguments"]
    else:
        empty, arguments = {**item, "content": []}, None
    yield {
        "type": "response.output_item.added",
        "output_index": index,
        "item": {**empty, "status": "in_progress"},
    }
    if arguments is not None:
        kind = "response.function_call_arguments"
        yield {"type": f"{kind}.delta", **at, "delta": arguments}
        yield {"type": f"{kind}.done", **at, "name": item["name"], "arguments": arguments}
    else:
        yield from _events_of_text(at, item)
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _events_of_text(at: dict[str, Any], item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    (part,) = item["content"]
    at = {**at, "content_index": 0}
    if item["type"] == "reasoning":
        yield {"type": "response.reasoning_text.delta", **at, "delta": part["text"]}
        yield {"type": "response.reasoning_text.done", **at, "text": part["text"]}
        return
    empty = {**part, "text": "", "logprobs": []}
    yield {"type": "response.content_part.added", **at, "part": empty}
    sampled = {"logprobs": part["logprobs"]}
    yield {"type": "response.output_text.delta", **at, "delta": part["text"], **sampled}
    yield {"type": "response.output_text.done", **at, "text": part["text"], **sampled}
    yield {"type": "response.content_part.done", **at, "part": part}
