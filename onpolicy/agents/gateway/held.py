"""Constraints on an answer: the format that a client asks for, or a call of its tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from onpolicy.agents.gateway.call_grammars import after_reasoning, form_of, tag_of
from onpolicy.agents.gateway.calls import Call
from onpolicy.agents.gateway.errors import invalid
from onpolicy.agents.gateway.parsing import AnswerParser
from onpolicy.rollout.episodes import Turns
from onpolicy.rollout.grammars import grammar_of

_TAIL = 32
"""The number of prompt tokens at the end that are searched for the mark that begins reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The constraint on an answer, and flags for its parsing."""

    json_schema: str | None = None
    structural_tag: str | None = None

    is_list: bool = False
    """Whether calls are a JSON list."""

    is_thinking: bool = False
    """Whether the prompt has begun the reasoning."""


def held_to(call: Call, parser: AnswerParser, turns: Turns, prompt_ids: Sequence[int] = ()) -> Held:
    """Return the constraint on the answer to a call after a prompt. Raises RefusedError."""
    rules, stops = turns.episode.rules, turns.request.params.stop_token_ids
    begin, end, is_always_thinking = parser.reasoning()
    tail = rules.decode([*prompt_ids[-_TAIL:]]).rstrip() if begin and prompt_ids else ""
    is_thinking = bool(begin) and tail.endswith(begin)
    forced = call.tools and (call.forces_call or call.one_call)
    form = form_of(call, parser, [rules.decode([stop]) for stop in stops]) if forced else None
    if form is not None and call.json_schema and not call.forces_call:
        raise invalid(
            "response_format",
            "an answer is held to it or to at most one call (parallel_tool_calls=False), and this "
            "request asks for both. Leave out one of them.",
        )
    if form is None and not call.json_schema:
        return Held(is_thinking=is_thinking)
    held = Held(json_schema=call.json_schema, is_thinking=is_thinking)
    if form is not None or begin:
        inner = form.format if form else _of_schema(call)
        if begin and not parser.reads_harmony:
            is_begun = is_thinking or is_always_thinking
            inner = after_reasoning(inner, begin, end, is_begun=is_begun)
        is_list = form is not None and form.is_list
        held = Held(structural_tag=tag_of(inner), is_list=is_list, is_thinking=is_thinking)
    field = "response_format" if form is None else "tools"
    if form is None and parser.reads_harmony:
        raise invalid(field, "an answer has several messages, and no grammar is made of them.")
    try:
        if grammar := grammar_of(None, held.json_schema, stops, held.structural_tag):
            rules.require_grammar(grammar)
    except ValueError as error:
        raise invalid(field, str(error)) from error
    return held


def _of_schema(call: Call) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": json.loads(call.json_schema)}
