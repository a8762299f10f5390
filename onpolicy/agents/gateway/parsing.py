"""What an answer says: reasoning, text and tool calls, found by SGLang's parsers.

The tokens stay as they were sampled: nothing here is rendered back into them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """Finds the parts of an answer in its text; importing SGLang's parsers takes seconds."""

    tool_call_parser: str = ""
    """One of SGLang's `--tool-call-parser`; empty: tools are not understood."""

    reasoning_parser: str = ""
    """One of SGLang's `--reasoning-parser`; empty: reasoning is text like any other."""

    read_bytes: ReadBytes | None = None
    """Gives the bytes of tokens; without it they are those of each token's text."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
        """The parts. An answer in which a parser fails or finds arguments that are no object is text."""
        reasoning, content = self._split_reasoning(text)
        if not tools or not self.tool_call_parser:
            return Parsed(content=content, reasoning=reasoning)
        try:
            left, calls = self._find_calls(content, tools)
        except Exception:  # a parser of somebody else's, on text of a policy's
            return Parsed(content=content, reasoning=reasoning)
        if not all(_is_object(arguments) for _, arguments in calls):
            return Parsed(content=content, reasoning=reasoning)
        return Parsed(content=left, reasoning=reasoning, calls=calls)

    def _split_reasoning(self, text: str) -> tuple[str, str]:
        if not self.reasoning_parser:
            return "", text
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        try:
            parser = ReasoningParser(self.reasoning_parser, stream_reasoning=False)
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


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except ValueError:
        return False
