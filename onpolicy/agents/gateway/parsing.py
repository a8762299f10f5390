"""Answers as clients read them: the reply, SGLang's parsers, and the bytes of tokens.

The tokens stay as they were sampled: nothing here is rendered back into them. A token may be a part
of a character, which becomes a replacement sign as text, so clients get the bytes too
(`bytes_reader`). Answers of GPT-OSS have the Harmony form, whose messages end with tokens that
SGLang's parser needs (https://cookbook.openai.com/articles/openai-harmony).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from onpolicy.agents.gateway.calls import Call, Ending, Reply, ToolCall
from onpolicy.agents.gateway.known import digest_of
from onpolicy.rollout.turns import Turns
from onpolicy.trajectory import Completion, FinishReason, Grammar

ReadBytes = Callable[[Sequence[int]], list[bytes]]


def make_reply(
    call: Call,
    branch: Turns,
    prompt_ids: Sequence[int],
    answer: Completion,
    parser: AnswerParser,
    held: Held,
) -> Reply:
    """Return the reply: the text without the token or text that ended it, parsed."""
    name = digest_of(branch.key)[:24]
    text, stopped_by = _shown(call, branch, answer)
    if parser.reads_harmony and answer.finish_reason == FinishReason.STOP and not stopped_by:
        text = with_call_marks(text)
    parsed = parser.parse(text, call.tools, held)
    is_cut = answer.finish_reason == FinishReason.LENGTH
    decode = branch.episode.rules.decode
    texts = [decode([token]) for token in answer.token_ids] if call.log_probs else []
    # Ids of calls are nine letters and digits: some templates accept no others, and print them.
    ending: Ending = "tool_calls" if parsed.calls else "length" if is_cut else "stop"
    return Reply(
        name=name,
        content=parsed.content,
        reasoning=parsed.reasoning,
        tool_calls=tuple(
            ToolCall(id=digest_of(name, i)[:9], name=function, arguments=arguments)
            for i, (function, arguments) in enumerate(parsed.calls)
        ),
        ending=ending,
        stopped_by=stopped_by,
        prompt_ids=prompt_ids,
        token_ids=answer.token_ids,
        log_probs=answer.log_probs if call.log_probs else (),
        token_texts=texts,
        token_bytes=_bytes_of(answer, parser, texts),
    )


def _shown(call: Call, branch: Turns, answer: Completion) -> tuple[str, str]:
    """Return the text, and the entry of the call's stop texts that ended it."""
    text, stop_token_ids = answer.text, branch.request.params.stop_token_ids
    if answer.finish_reason == FinishReason.STOP and answer.token_ids[-1] in stop_token_ids:
        return text, ""
    found = [(text.find(stop), stop) for stop in call.stop if stop in text]
    start, stop = min(found, default=(len(text), ""))
    return text[:start], stop


def _bytes_of(answer: Completion, parser: AnswerParser, texts: Sequence[str]) -> list[bytes]:
    """Return the bytes of each token whose text was requested."""
    if texts and parser.read_bytes is not None:
        return parser.read_bytes(answer.token_ids)
    return [text.encode() for text in texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The constraint on an answer, and flags for its parsing."""

    grammar: Grammar | None = None

    is_list: bool = False
    """Whether calls are a JSON list."""

    begins: tuple[str, ...] = ()
    """The texts with one of which an answer begins if it calls; empty: any."""

    is_thinking: bool = False
    """Whether the prompt has begun the reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParser:
    """A parser of answers; importing SGLang's parsers takes seconds."""

    tool_call_parser: str = ""
    """A value of SGLang's `--tool-call-parser`; empty: tool calls are not parsed."""

    reasoning_parser: str = ""
    """A value of SGLang's `--reasoning-parser`; empty: reasoning is ordinary text."""

    read_bytes: ReadBytes | None = None
    """A function that gives the bytes of tokens; without it each token's text is encoded."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]], held: Held) -> Parsed:
        """Return the parts of an answer: text where a parser fails or arguments are no object."""
        reasoning, content = self._split_reasoning(text, held.is_thinking)
        is_text = bool(held.begins) and not content.lstrip().startswith(held.begins)
        if not tools or not self.tool_call_parser or is_text:
            return Parsed(content=content, reasoning=reasoning)
        try:
            left, calls = (
                ("", calls_in_list(content)) if held.is_list else self._find_calls(content, tools)
            )
        except Exception:  # a parser of somebody else's, on text of a policy's
            return Parsed(content=content, reasoning=reasoning)
        if not all(_is_object(arguments) for _, arguments in calls):
            return Parsed(content=content, reasoning=reasoning)
        return Parsed(content=left, reasoning=reasoning, calls=calls)

    @property
    def reads_harmony(self) -> bool:
        """Whether answers have the Harmony form of GPT-OSS."""
        return PARSER in (self.tool_call_parser, self.reasoning_parser)

    def reasoning(self) -> tuple[str, str, bool]:
        """Return the marks of reasoning, if any, and whether every answer begins within it."""
        if not self.reasoning_parser:
            return "", "", False
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        detector = ReasoningParser(self.reasoning_parser, stream_reasoning=False).detector
        marks = [getattr(detector, f"think_{end}_token", None) or "" for end in ("start", "end")]
        return str(marks[0]), str(marks[1]), bool(getattr(detector, "_in_reasoning", False))

    def _split_reasoning(self, text: str, is_thinking: bool) -> tuple[str, str]:
        if not self.reasoning_parser or (self.reads_harmony and "<|channel|>" not in text):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The parts of an answer."""

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments as JSON) of each tool call."""


def calls_in_list(text: str) -> tuple[tuple[str, str], ...]:
    """Return (name, arguments as JSON) of calls in a JSON list. Raises an error for anything else."""
    return tuple((each["name"], json.dumps(each["parameters"])) for each in json.loads(text))


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except ValueError:
        return False


PARSER = "gpt-oss"
"""The name of SGLang's tool-call and reasoning parsers for such answers."""

BEGIN, CALL_END = "<|start|>", "<|call|>"


def with_call_marks(text: str) -> str:
    """Return an answer without its stop token as SGLang's parser finds a last call in it.

    It needs the token that ends a call, which is also a stop token; a call that ends with the
    token of a final answer counts too (sgl-project/sglang#10576). And it needs the beginning of the
    call's message, which is in the prompt if the answer calls at once.
    """
    before, begin, message = text.rpartition(BEGIN)
    header, has_text, _ = message.partition("<|message|>")
    if not has_text or " to=" not in header:
        return text
    return f"{before}{begin or BEGIN + 'assistant'}{message}{CALL_END}"


_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}
"""GPT-2's mapping between characters and bytes, in which byte-level vocabularies are written."""

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""The form of a byte in SentencePiece's vocabularies."""


def bytes_reader(tokenizer: PreTrainedTokenizerBase) -> ReadBytes:
    """Return a function that gives the bytes of tokens; joined, they are the UTF-8 of their text.

    It repeats the steps of the tokenizer's decoder before bytes become text: for byte-level
    vocabularies and for SentencePiece's with byte fallback. In others each token is its own text.
    """

    def decode(token_ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(list(token_ids), **options))

    read = _piece_reader(tokenizer)
    if read is None:
        return lambda token_ids: [decode([token]).encode() for token in token_ids]

    def read_all(token_ids: Sequence[int]) -> list[bytes]:
        pieces = [tokenizer.convert_ids_to_tokens(token) for token in token_ids]
        found = [read(str(piece)) if piece is not None else b"" for piece in pieces]
        return _without_spaces(
            found, _leading(b"".join(found)) - _leading(decode(token_ids).encode())
        )

    return read_all


def offsets(token_bytes: Iterable[bytes]) -> Iterator[int]:
    """Yield the index of the character in which each token begins."""
    decoder, count = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for part in token_bytes:
        yield count
        count += len(decoder.decode(part))


def _piece_reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes] | None:
    """Return the function from a vocabulary's entry to bytes, if the decoder's steps are known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state.get("decoders", [state])
    kinds = {step["type"] for step in steps}
    if kinds <= {"ByteLevel", "ByteFallback", "Fuse"} and "ByteLevel" in kinds:
        return _of_byte_level
    if not kinds <= {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}:
        return None
    replaced = {
        step["pattern"]["String"]: step["content"]
        for step in steps
        if step["type"] == "Replace" and "String" in step["pattern"]
    }
    replaced |= {step["replacement"]: " " for step in steps if step["type"] == "Metaspace"}

    def of_pieces(piece: str) -> bytes:
        if "ByteFallback" in kinds and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        for old, new in replaced.items():
            piece = piece.replace(old, new)
        return piece.encode()

    return of_pieces


def _of_byte_level(piece: str) -> bytes:
    found = [_OF_CHARACTER.get(character) for character in piece]
    return piece.encode() if None in found else bytes(byte for byte in found if byte is not None)


def _leading(text: bytes) -> int:
    return len(text) - len(text.lstrip(b" "))


def _without_spaces(parts: list[bytes], count: int) -> list[bytes]:
    """Return the parts without the first spaces, which decoders drop where a text begins."""
    for i, part in enumerate(parts):
        dropped = min(max(count, 0), _leading(part))
        parts[i], count = part[dropped:], count - dropped
    return parts
