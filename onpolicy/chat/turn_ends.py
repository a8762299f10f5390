"""End of an assistant's turn in a chat template, found by rendering an answer that holds a mark.

The text after an answer shows at which token a policy has finished it. The end-of-sequence tokens
of a checkpoint's files often lack that token: in a base model with an added chat template, with a
generation_config.json copied from the base, or for an end that only tool calls have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

from onpolicy.chat.bounded import bound_templates

_MARK = "(the end of this answer)"
_NEXT = "(the words of the next message)"
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object"}},
}
"""A tool with all that templates ask for: GPT-OSS's refuses one without a description."""
_CALL_ID = "call00001"

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnds:
    """The ends of an assistant's turns in a chat template."""

    token_ids: tuple[int, ...] = ()
    """The token that ends an answer and, if it is another one, the token that ends a tool call.
    Where nothing follows an answer, as in GLM's templates, the marker of the next turn."""

    text: str = ""
    """The text that ends an answer, where no token of the tokenizer does."""


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> TurnEnds | None:
    """Return how the tokenizer's chat template ends the turns of an assistant.

    None: there is no template, or it refuses a chat of a question and an answer, or leaves the
    answer out. A marker that occurs only where a chat is over is skipped if another one occurs also
    where it goes on: Phi-3 writes `<|end|>` after each answer and `<|endoftext|>` after the last
    message. A marker that occurs only where a chat goes on is no end: GPT-OSS ends an answer with
    `<|return|>`, and writes `<|end|>` in its place afterwards."""
    bound_templates()
    closing = _after_mark(tokenizer, [([*chat], ()) for chat in _answered()])
    if closing is None:
        return None
    following = {"role": "user", "content": _NEXT}
    goes_on = _after_mark(tokenizer, [([*chat, following], ()) for chat in _answered()]) or ""
    between, is_special = goes_on.partition(_NEXT)[0], _special(tokenizer)
    closes, begins_next = _markers(tokenizer, closing), _markers(tokenizer, between)
    # Prefer a marker that also occurs where the chat goes on, and among these a special token.
    shared = [token for token in closes if token in begins_next] or closes or begins_next
    if not shared:
        return TurnEnds(text=closing.strip() or between.strip())
    end = next((token for token in shared if token in is_special), shared[0])
    return TurnEnds(token_ids=tuple(dict.fromkeys([end, *_call_end(tokenizer, end, is_special)])))


def _call_end(tokenizer: PreTrainedTokenizerBase, end: int, is_special: set[int]) -> Iterator[int]:
    """Yield the token that ends a call, if it differs from the token that ends an answer. It is a
    special token: further calls can follow `</tool_call>`, which may be an added token."""
    closing = _after_mark(tokenizer, [(chat, [_TOOL]) for chat in _calling()])
    if closing is None or end in (closes := _markers(tokenizer, closing)):
        return
    result = {"role": "tool", "tool_call_id": _CALL_ID, "name": "f", "content": _NEXT}
    goes_on = _after_mark(tokenizer, [([*chat, result], [_TOOL]) for chat in _calling()]) or ""
    begins_next = _markers(tokenizer, goes_on.partition(_NEXT)[0])
    yield from [token for token in closes if token in is_special][-1:] or [
        token for token in begins_next if token in is_special
    ][:1]


def _answered() -> Iterator[list[Message]]:
    """Yield chats that end with a marked answer; some templates need a system message."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    yield chat
    yield [{"role": "system", "content": "?"}, *chat]


def _calling() -> Iterator[list[Message]]:
    """Yield chats that end with a call whose argument is the mark: an object, or its JSON as text."""
    for arguments in ({"x": _MARK}, json.dumps({"x": _MARK})):
        function = {"name": "f", "arguments": arguments}
        call = {"type": "function", "id": _CALL_ID, "function": function}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        yield [{"role": "user", "content": "?"}, message]


def _after_mark(
    tokenizer: PreTrainedTokenizerBase,
    chats: Iterable[tuple[list[Message], Sequence[dict[str, Any]]]],
) -> str | None:
    """Return the text after the mark in the first chat that the template accepts and writes whole."""
    for messages, tools in chats:
        try:
            text = tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=False
            )
        except Exception:  # a template is a program of the checkpoint's
            continue
        if isinstance(text, str) and _MARK in text:
            return text[text.rindex(_MARK) + len(_MARK) :]
    return None


def _markers(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the special and added tokens of a text, in order."""
    markers = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    return [x for x in tokenizer.encode(text, add_special_tokens=False) if x in markers]


def _special(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = tokenizer.added_tokens_decoder
    return {token for token, each in added.items() if each.special} | {*tokenizer.all_special_ids}
