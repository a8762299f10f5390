"""Parsing of answers by SGLang's parsers into reasoning, text and tool calls.

The tokens stay as they were sampled: nothing here is rendered back into them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onpolicy.agents.gateway import harmony
from onpolicy.agents.gateway.token_bytes import ReadBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The parts of an answer."""

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments as JSON) of each tool call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParser:
    """A parser of answers; importing SGLang's parsers takes seconds."""

    tool_call_parser: str = ""
    """A value of SGLang's `--tool-call-parser`; empty: tool calls are not parsed."""

    reasoning_parser: str = ""
    """A value of SGLang's `--reasoning-parser`; empty: reasoning is ordinary text."""

    read_bytes: ReadBytes | None = None
    """A function that gives the bytes of tokens; without it each token's text is encoded."""

    def parse(
        self,
        text: str,
        tools: Sequence[Mapping[str, Any]],
        *,
        is_list: bool = False,
        is_thinking: bool = False,
    ) -> Parsed:
        """Return the parts of an answer; one that a parser fails on, or whose arguments are no
        object, is text.

        is_list: whether calls are a JSON list. is_thinking: whether the prompt has begun the
        reasoning.
        """
        reasoning, content = self._split_reasoning(text, is_thinking)
        if not tools or not self.tool_call_parser:
            return Parsed(content=content, reasoning=reasoning)
        try:
            left, calls = (
                ("", calls_in_list(content)) if is_list else self._find_calls(content, tools)
            )
        except Exception:  # a parser of somebody else's, on text of a policy's
            return Parsed(content=content, reasoning=reasoning)
        if not all(_is_object(arguments) for _, arguments in calls):
            return Parsed(content=content, reasoning=reasoning)
        return Parsed(content=left, reasoning=reasoning, calls=calls)

    @property
    def reads_harmony(self) -> bool:
        """Whether answers have the Harmony form of GPT-OSS."""
        return harmony.PARSER in (self.tool_call_parser, self.reasoning_parser)

    def reasoning(self) -> tuple[str, str, bool]:
        """Return the begin and end marks of reasoning (empty without a parser), and whether every
        answer begins within reasoning."""
        if not self.reasoning_parser:
            return "", "", False
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        detector = ReasoningParser(self.reasoning_parser, stream_reasoning=False).detector
        marks = [getattr(detector, f"think_{end}_token", None) or "" for end in ("start", "end")]
        return str(marks[0]), str(marks[1]), bool(getattr(detector, "_in_reasoning", False))

    def _split_reasoning(self, text: str, is_thinking: bool) -> tuple[str, str]:
        if not self.reasoning_parser or (self.reads_harmony and not harmony.has_marks(text)):
            return "", text
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        try:
            parser = ReasoningParser(
                self.reasoning_parser,
                stream_reasoning=False,
                force_reasoning=is_thinking or None,  # else as the parser has it
            )
            reasoning, content = parser.parse_non_stream(text)
        except Exception:
            return "", text
        return reasoning or "", content or ""

    def _find_calls(
        self, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, tuple[tuple[str, str], ...]]:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        parser = FunctionCallParser([Tool(**tool) for tool in tools], self.tool_call_parser)
        if not parser.has_tool_call(text):
            return text, ()
        left, calls = parser.parse_non_stream(text)
        return left or "", tuple((call.name or "", call.parameters) for call in calls)


def calls_in_list(text: str) -> tuple[tuple[str, str], ...]:
    """Return (name, arguments as JSON) of calls in a JSON list. Raises an error for anything else."""
    return tuple((each["name"], json.dumps(each["parameters"])) for each in json.loads(text))


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except ValueError:
        return False
