"""Constraints on an answer: the format that a client asks for, or a call of its tools.

An answer may have to call a tool, to make at most one call, or to call or be in a format. A call has
the form that SGLang's parser finds: the texts around its arguments and their JSON schema, as a
structural tag of xgrammar. Where a parser has no such form, a forced call is a JSON list of names
and parameters, as in SGLang's own server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onpolicy.agents.gateway import parsing
from onpolicy.agents.gateway.calls import Call
from onpolicy.agents.gateway.parsing import AnswerParser, Held
from onpolicy.agents.gateway.refusals import RefusedError, invalid, unsupported
from onpolicy.rollout.rollouter import Turns

_TAIL = 32
"""The number of prompt tokens at the end that are searched for the mark that begins reasoning."""

Format = dict[str, Any]


def held_to(call: Call, parser: AnswerParser, turns: Turns, prompt_ids: Sequence[int] = ()) -> Held:
    """Return the constraint on the answer to a call after a prompt. Raises RefusedError."""
    rules, stops = turns.episode.rules, turns.request.params.stop_token_ids
    begin, end, is_always_thinking = parser.reasoning()
    tail = rules.decode([*prompt_ids[-_TAIL:]]).rstrip() if begin and prompt_ids else ""
    is_thinking = bool(begin) and tail.endswith(begin)
    form = None
    if call.tools:
        form = form_of(call, parser, [rules.decode([stop]) for stop in stops])
    if form is None and not call.json_schema:
        return Held(is_thinking=is_thinking)
    asked = {"json_schema": call.json_schema}
    if form is not None or begin:
        inner = form.format if form else _of_schema(call)
        if form is not None and call.calls_or_formats:
            inner = {"type": "or", "elements": [inner, _of_schema(call)]}
        if begin and not parser.reads_harmony:
            is_begun = is_thinking or is_always_thinking
            inner = after_reasoning(inner, begin, end, is_begun=is_begun)
        asked = {"structural_tag": tag_of(inner)}
    may_format = form is None or call.calls_or_formats
    field = "response_format" if may_format else "tools"
    if may_format and parser.reads_harmony:
        raise invalid(field, "an answer has several messages, and no grammar is made of them.")
    try:
        grammar = turns.grammar(**asked)
    except ValueError as error:
        raise invalid(field, str(error)) from error
    return Held(
        grammar=grammar,
        is_list=form is not None and form.is_list,
        begins=() if form is None else form.begins,
        is_thinking=is_thinking,
    )


def form_of(call: Call, parser: AnswerParser, stops: Sequence[str]) -> CallForm | None:
    """Return the form that a request's tools require of its answer, if any. Raises RefusedError."""
    if not call.tools or not (call.forces_call or call.one_call or call.json_schema):
        return None
    name = parser.tool_call_parser
    if call.calls_or_formats and name != parsing.PARSER:
        return _beside_format(call, parser, stops)
    if name == parsing.PARSER:
        return CallForm(format=_harmony(call)) if call.forces_call else None
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    field, value = ("tool_choice", call.named_tool or "required")
    if not call.forces_call:
        field, value = "parallel_tool_calls", "False"
    tools = [Tool(**{**tool, "function": _strict(tool)}) for tool in _callable(call)]
    try:
        of_sglang = FunctionCallParser(tools, name)
        found = _native(call, of_sglang)
    except ValueError as error:
        raise _refused(field, value, name) from error
    if found is not None and not _holds(found, stops):
        return CallForm(format=found)
    if found is not None or not call.forces_call or of_sglang.detector.parses_required_natively():
        raise _refused(field, value, name)
    return CallForm(format=_list(call), is_list=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """The form that an answer's calls must have."""

    format: Format
    """A part of a structural tag."""

    is_list: bool = False
    """Whether calls are a JSON list, which none of SGLang's parsers reads."""

    begins: tuple[str, ...] = ()
    """The texts with one of which the calls begin, where an answer may be in a format instead."""


def tag_of(form: Format) -> str:
    """Return a structural tag as text."""
    return json.dumps({"type": "structural_tag", "format": form})


def _of_schema(call: Call) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": json.loads(call.json_schema)}


def _beside_format(call: Call, parser: AnswerParser, stops: Sequence[str]) -> CallForm:
    """Return the form of calls that no answer in a format can be taken for."""
    try:
        found = form_of(replace(call, forces_call=True), parser, stops)
    except RefusedError:
        found = None
    begins = () if found is None or found.is_list else _begins(found.format)
    if found is None or not begins:
        why = _NONE.format("a call or an answer in the format", parser.tool_call_parser)
        raise unsupported(
            "response_format",
            f"response_format beside tools cannot be honoured: {why} With tool_choice=none no tool is "
            "called.",
        )
    return replace(found, begins=begins)


def _begins(form: Format) -> tuple[str, ...]:
    """Return the texts with one of which a form begins; none if they are not known."""
    match form["type"]:
        case "const_string":
            return (form["value"].lstrip(),)
        case "tag":
            return (form["begin"].lstrip(),) if form["begin"].strip() else ()
        case "sequence":
            return _begins(form["elements"][0])
        case "triggered_tags" | "tags_with_separator":
            each = [_begins(tag) for tag in form["tags"]]
            return tuple(begin for begins in each for begin in begins) if all(each) else ()
    return ()


def _native(call: Call, parser: Any) -> Format | None:
    """Return the form that an SGLang parser reads, if it has one."""
    tools, detector = parser.tools, parser.detector
    if not detector.supports_structural_tag() or detector.parses_required_natively():
        return None
    choice = "required" if call.forces_call else "auto"
    tag = detector.get_structural_tag(
        tools=tools, tool_choice=choice, parallel_tool_calls=not call.one_call
    )
    if tag is not None:
        found: Format = tag.model_dump()["format"]
        return found
    infos = [(tool, detector.structure_info()(tool.function.name)) for tool in tools]
    shown = [f"{info.begin}{{}}{info.end}" for _, info in infos]
    if not all(parser.has_tool_call(text) and parser.parse_non_stream(text)[1] for text in shown):
        return None  # the parser would not find it
    tags = [_tag(info.begin, tool.function.parameters, info.end) for tool, info in infos]
    return _calls(call, sorted({info.trigger for _, info in infos}), tags)


def _harmony(call: Call) -> Format:
    """Return the form of a call, maybe after an analysis; a stop token ends it."""
    channel = "<|channel|>commentary"
    begin = channel + " to=functions.{} <|constrain|>json<|message|>"
    tags = [
        _tag(begin.format(tool["function"]["name"]), tool["function"].get("parameters"), "")
        for tool in _callable(call)
    ]
    found: Format = {"type": "or", "elements": tags}
    return after_reasoning(
        found, "<|channel|>analysis<|message|>", "<|end|>", between="<\\|start\\|>assistant"
    )


def after_reasoning(
    form: Format, begin: str, end: str, *, is_begun: bool = False, between: str = "\n{0,2}"
) -> Format:
    """Return a form that may follow reasoning, and must where the prompt has begun it.

    begin, end: the marks of reasoning. between: a regular expression for the text after it.
    """
    content = {"type": "any_text"}
    reasoning = {"type": "tag", "begin": "" if is_begun else begin, "content": content, "end": end}
    after = {
        "type": "sequence",
        "elements": [reasoning, {"type": "regex", "pattern": between}, form],
    }
    return after if is_begun else {"type": "or", "elements": [after, form]}


def _calls(call: Call, triggers: Sequence[str], tags: Sequence[Format]) -> Format:
    return {
        "type": "triggered_tags",
        "triggers": [*triggers],
        "tags": [*tags],
        "at_least_one": call.forces_call,
        "stop_after_first": call.one_call,
    }


def _tag(begin: str, parameters: Mapping[str, Any] | None, end: str) -> Format:
    content = {"type": "json_schema", "json_schema": _arguments(parameters)}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _list(call: Call) -> Format:
    """Return the form of a list of calls; definitions of the tools move to its root."""
    definitions, items = dict[str, Any](), []
    for tool in _callable(call):
        parameters = dict(_arguments(tool["function"].get("parameters")))
        for keyword in ("$defs", "definitions"):
            known = definitions.setdefault(keyword, {})
            for name, schema in (parameters.pop(keyword, None) or {}).items():
                if known.setdefault(name, schema) != schema:
                    raise invalid(
                        "tools",
                        f"{keyword}.{name}: two tools define it, and not alike. Rename one.",
                    )
        called = {"name": {"const": tool["function"]["name"]}, "parameters": parameters}
        items.append({"type": "object", "properties": called, "required": [*called]})
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    if call.one_call:
        schema["maxItems"] = 1
    schema |= {keyword: known for keyword, known in definitions.items() if known}
    return {"type": "json_schema", "json_schema": schema}


def _arguments(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a call's arguments, always of type object."""
    return {"type": "object", **(parameters or {})}


def _strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function whose schema SGLang puts into a tag."""
    parameters = _arguments(tool["function"].get("parameters"))
    return {**tool["function"], "parameters": parameters, "strict": True}


def _callable(call: Call) -> list[Mapping[str, Any]]:
    """Return the tools that the answer may call."""
    named = [tool for tool in call.tools if tool["function"]["name"] == call.named_tool]
    return named or [*call.tools]


def _holds(form: Any, stops: Sequence[str]) -> bool:
    """Return whether a text of a form contains a stop token's, which would end the answer there."""
    if isinstance(form, dict):
        texts = [form.get("begin"), form.get("end")]
        return any(_holds(each, stops) for each in (*texts, *form.values()))
    if isinstance(form, (list, tuple)):
        return any(_holds(each, stops) for each in form)
    return isinstance(form, str) and any(stop in form for stop in stops if stop)


_NONE = (
    "no grammar can be made of {} with --tool-call-parser={}. Leave it out, or use another parser."
)


def _refused(field: str, value: str, name: str) -> RefusedError:
    why = _NONE.format("its calls", name)
    return unsupported(field, f"{field}={value} cannot be honoured: {why}")
