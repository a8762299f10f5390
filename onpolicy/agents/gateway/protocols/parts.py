"""Parts shared by several protocols."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from onpolicy.agents.gateway.calls import Reply
from onpolicy.agents.gateway.errors import invalid
from onpolicy.agents.gateway.fields import Fields

ALWAYS_SENT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
)  # fmt: skip
"""Fields that do not change sampling; they are ignored."""

SET_FOR_ALL = (
    "how much the policy thinks is a variable of its chat template, if it is one, for all requests of a "
    "run. Start it with --chat-template-kwargs '{{{}}}', and leave this out."
)
"""The reason why a request cannot set the amount of thinking."""

CREATED = 0
"""The time in every answer, constant so that a repeated run gives the same bytes."""


def text_of(value: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return content, which is text or a list of parts of these kinds, as one text."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise invalid(where, f"must be text or a list of parts, and is {value!r:.80}.")
    parts = [Fields(part, f"{where}[{i}]") for i, part in enumerate(value)]
    return "".join(text_part(part, kinds) for part in parts)


def text_part(part: Fields, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of one content part."""
    kind = part.need("type", str)
    if kind not in kinds:
        raise invalid(part.name("type"), f"{kind!r}: the policy reads {', '.join(kinds)} alone.")
    return part.need("text", str)


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a tool in the form that chat templates read."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": {**function, "parameters": parameters or {}}}


def schema_in(form: Fields, nested: str = "") -> str:
    """Return the JSON schema in a response format as text; empty: none. It is in the format's own
    fields, or in an object `nested` in them."""
    match form.need("type", str):
        case "text":
            schema = None
        case "json_object":
            schema = {"type": "object"}
        case "json_schema":
            inner = Fields(form.need(nested, dict), form.name(nested)) if nested else form
            schema = inner.need("schema", dict)
            inner.ignore("name", "description", "strict")  # it is always strict
            inner.end()
        case kind:
            raise invalid(
                form.name("type"), f"{kind!r} is none of text, json_object and json_schema."
            )
    form.end()
    return "" if schema is None else json.dumps(schema)


def usage(replies: Sequence[Reply]) -> dict[str, int]:
    """Return the token counts of a prompt and of all answers to it."""
    given, sampled = len(replies[0].prompt_ids), sum(len(reply.token_ids) for reply in replies)
    return {
        "prompt_tokens": given,
        "completion_tokens": sampled,
        "total_tokens": given + sampled,
    }
