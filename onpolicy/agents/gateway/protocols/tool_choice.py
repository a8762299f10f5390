"""Tool choice: the tools that an answer may or must call, and the number of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from onpolicy.agents.gateway.errors import RefusedError, invalid
from onpolicy.agents.gateway.fields import Fields

Tool = dict[str, Any]


class Choice(TypedDict):
    """The fields of a call for tool choice."""

    tools: tuple[Tool, ...]
    forces_call: bool
    named_tool: str
    one_call: bool


def openai_choice(fields: Fields, tools: Sequence[Tool]) -> Choice:
    """Return the choice in `tool_choice` and `parallel_tool_calls`. Raises RefusedError."""
    where, given = fields.name("tool_choice"), fields.pop("tool_choice")
    one_call = not fields.take("parallel_tool_calls", bool, True)
    if not isinstance(given, dict):
        return _choice(where, tools, given, ("auto", "none", "required"), one_call=one_call)
    choice = Fields(given, where)
    if (kind := choice.need("type", str)) != "function":
        raise invalid(choice.name("type"), f"{kind!r}: a function alone can be chosen.")
    inner = (
        Fields(choice.pop("function"), choice.name("function")) if "function" in given else choice
    )
    name = inner.need("name", str)
    inner.end()
    choice.end()
    return _choice(where, tools, "required", ("required",), name, one_call)


def anthropic_choice(fields: Fields, tools: Sequence[Tool]) -> Choice:
    """Return the choice in Anthropic's `tool_choice`. Raises RefusedError."""
    where = fields.name("tool_choice")
    choice = Fields(fields.take("tool_choice", dict, {"type": "auto"}), where)
    kind = choice.need("type", str)
    name = choice.need("name", str) if kind == "tool" else ""
    one_call = choice.take("disable_parallel_tool_use", bool, False)
    choice.end()
    return _choice(f"{where}.type", tools, kind, ("auto", "none", "any", "tool"), name, one_call)


def _choice(
    where: str,
    tools: Sequence[Tool],
    kind: Any,
    kinds: Sequence[str],
    name: str = "",
    one_call: bool = False,
) -> Choice:
    if kind is not None and kind not in kinds:
        raise RefusedError(
            400,
            f"{where}={kind!r:.80} cannot be honoured: it is none of {', '.join(kinds)}.",
            code="unsupported_parameter",
            field=where,
        )
    forces = kind in ("required", "any", "tool")
    names = [tool["function"]["name"] for tool in tools]
    if forces and not tools:
        raise invalid(where, f"{kind!r} forces a call, and there are no tools. Give some.")
    if name and name not in names:
        raise invalid(where, f"there is no tool {name!r}. There are {', '.join(names)}.")
    given = () if kind == "none" else tuple(tools)
    return Choice(tools=given, forces_call=forces, named_tool=name, one_call=one_call)
