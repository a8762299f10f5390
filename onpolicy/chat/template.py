"""Tokenisation of chats: rendered by the tokenizer's template, and continued as they were sampled.

A template is a program: given the whole chat again it may rewrite the past. It drops earlier
thinking, merges the results of tools, serialises the arguments of a call in its own way, trims, or
ends an answer with another token than the sampled one. Rebuilt from text, such a chat has other
tokens than the policy saw and sampled. So a chat is never rebuilt here: its tokens are followed by
the rest of the template's text, tokenised alone. Where that text does not begin with the text of
the tokens, the template drifts, and a rule decides what happens (`DriftRule`).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from onpolicy.chat.messages import Message, names_called, replaced
from onpolicy.chat.rendering import ChatRenderer
from onpolicy.errors import ConfigError
from onpolicy.images.placed import PlacedImage
from onpolicy.images.placing import ImagePlacer, SeenImage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DriftRule = Literal["new", "words", "keep", "refuse"]
"""The reaction to a template that rewrites the past: begin a new trajectory at the first token that
differs, keep the tokens if the template's text has the same words, keep them always, or raise
ChatDriftError."""

_MARK = "(the end of this answer)"
"""A placeholder for an answer, whose end is searched in the template's text."""


class ChatDriftError(ValueError):
    """A template rewrites the past of a chat, and the rule refuses that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The place where a template's text differs from a chat's tokens."""

    token: int
    """The first token that differs, counted from 0."""

    had: str
    """The text of the tokens from there on, at most 40 characters."""

    wants: str

    def __str__(self) -> str:
        return (
            f"token {self.token}: the chat has {self.had!r}, and its template says {self.wants!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The continuation of a chat."""

    kept: int
    """The number of tokens that stay, from the first on: all, unless the rule is a new trajectory.
    """

    token_ids: list[int]
    drift: Drift | None = None


class ChatTemplate(ChatRenderer):
    """The template of a tokenizer, applied as SGLang's chat endpoint does. stop_token_ids: the
    tokens that end an answer. options: further variables of the template, such as enable_thinking.
    placer: places images that were read; None: there are none. Raises ValueError for an option that
    the template does not read; all methods raise it for messages that the template refuses."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int] = (),
        rule: DriftRule = "new",
        options: Mapping[str, Any] | None = None,
        placer: ImagePlacer | None = None,
    ):
        super().__init__(tokenizer, options, placer)
        self.rule = rule
        self._stops = {self._decode([token]) for token in stop_token_ids}
        added = tokenizer.get_added_vocab().values()
        self._special = {self._decode([token]) for token in added} | self._stops
        self.vocab_size = len(tokenizer)

    def begin(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the tokens of a chat that the policy continues: with an answer, or within a last
        message by the assistant. Agents may send tools that the template does not write."""
        return self.encode(self._render(messages, tools, begins=True))

    def begin_text(self, text: str) -> list[int]:
        """Return the tokens of a plain text, as the beginning of a sequence."""
        return text_ids(self._tokenizer, text)

    def answer(
        self,
        known: Sequence[Message],
        answer: Message,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the tokens of an answer as a policy would have sampled it: from the end of `begin`
        to its stop token. The text of a stop token within the answer is ordinary text."""
        before, marked, marks = self._render(known, tools), answer, dict[str, str]()
        if any(stop in text for text in _texts(answer) for stop in self._stops):
            # Characters of the last private-use plane, which no text has.
            marks = {stop: chr(0x10FF00 + i) for i, stop in enumerate(sorted(self._stops))}
            marked = replaced(answer, marks)
        text = self._render([*known, marked], tools, goes_on=False)
        said = text.removeprefix(before)
        ends = [said.index(stop) + len(stop) for stop in self._stops if stop in said]
        if not text.startswith(before) or not ends:
            raise ValueError(
                "the chat template has an answer not after its own beginning, or ends it with no stop "
                "token, so what is to be learnt is not known"
            )
        said = said[: min(ends)]
        if not marks:
            return self.encode(said)
        token_ids = self._encode_marked(said, {mark: stop for stop, mark in marks.items()})
        whole = self._normal(self._render([*known, answer], tools, goes_on=False))
        if not whole.startswith(self._normal(before) + self._text(token_ids)):
            raise ValueError(
                f"the answer holds the text of a stop token ({', '.join(map(repr, marks))}), and the "
                "tokenizer or the template cannot write it without ending the answer"
            )
        return token_ids

    def _encode_marked(self, text: str, stops: Mapping[str, str]) -> list[int]:
        """Return the tokens of text with marks for stop tokens, whose texts become ordinary tokens."""
        token_ids: list[int] = []
        for piece in filter(None, re.split(f"([{''.join(stops)}])", text)):
            token_ids += self._tokenizer.encode(
                stops.get(piece, piece), add_special_tokens=False,
                split_special_tokens=piece in stops,
            )  # fmt: skip
        return token_ids

    def go_on(
        self,
        token_ids: Sequence[int],
        known: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Continuation:
        """Return the continuation of a chat after an answer. token_ids: the chat so far, which ends
        with the answer as it was sampled; known: its messages; messages: the new ones."""
        have = self._text(token_ids)
        wanted = self._normal(self._render([*known, *messages], tools))
        if wanted.startswith(have):
            return Continuation(kept=len(token_ids), token_ids=self.encode(wanted[len(have) :]))
        kept, length = self._common(token_ids, have, wanted)
        drift = Drift(token=kept, had=have[length:][:40], wants=wanted[length:][:40])
        if self.rule == "refuse":
            raise ChatDriftError(f"--chat-drift refuse: {drift}.")
        new = Continuation(kept=kept, token_ids=self.encode(wanted[length:]), drift=drift)
        if self.rule == "new":
            return new
        try:
            more = self.after_answer(token_ids, messages, tools, known)
        except ValueError:
            if self.rule == "keep":
                raise
            return new
        if self.rule == "words" and self._words(have + self._text(more)) != self._words(wanted):
            return new
        return Continuation(kept=len(token_ids), token_ids=more, drift=drift)

    def _words(self, text: str) -> Counter[str]:
        """Return how often each word and each punctuation mark occurs besides the frame."""
        frame = "|".join(map(re.escape, sorted(self._frame, key=len, reverse=True)))
        return Counter(re.findall(r"\w+|[^\w\s]", re.sub(frame, " ", text)))

    @cached_property
    def _frame(self) -> set[str]:
        """The special tokens without a meaning of their own: all, unless the stop tokens are the
        roles of the next messages, as in GLM's templates, which end no answer."""
        has_end = self._after_mark((), (), ())[0]
        return self._special if has_end else self._special - self._stops

    def after_answer(
        self,
        token_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        known: Sequence[Message] = (),
    ) -> list[int]:
        """Return the tokens that the template adds for messages after an answer, whatever came
        before it. They begin with the end of the answer, unless the last of `token_ids` has ended
        it: a stop token that the template also writes there occurs once. known: the messages up to
        the answer, whose calls name the functions of results."""
        end, rest = self._after_mark(messages, tools, known)
        names = names_called([{"tool_calls": tools}])
        if any(name in rest for name in names):
            # Mistral's moves the tools to the last user message; they stay where they were read.
            bare = self._after_mark(messages, (), known)[1]
            rest = bare if any(rest.count(name) > bare.count(name) for name in names) else rest
        if (last := self._decode(token_ids[-1:])) not in self._stops:
            return self.encode(end + rest)
        return self.encode(rest if end else rest.removeprefix(last))

    def _after_mark(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        known: Sequence[Message],
    ) -> tuple[str, str]:
        """Return the special token that ends an answer in the template, and the text after it. Where
        nothing ends an answer (GLM's; a call in DeepSeek-V3's), that is empty, and what follows."""
        for answer in _marked_answers(messages, names_called(known[-1:])):
            chat = [{"role": "user", "content": "?"}, answer]
            text = self._render([*chat, *messages], tools)
            if _MARK not in text:
                continue
            rest = text[text.rindex(_MARK) + len(_MARK) :]
            closing = self._render(chat, tools, goes_on=False).rpartition(_MARK)[2]
            if answer.get("tool_calls"):
                same = rest[: _agreement(rest, closing)]
                cut = min((same.index(x) for x in self._stops if x in same), default=len(same))
                rest, closing = rest[cut:], closing[cut:]
            has_end = closing.startswith(tuple(self._special))
            ends = [text for text in self._special if has_end and rest.startswith(text)]
            end = max(ends, key=len, default="")
            return end, rest.removeprefix(end)
        raise ValueError("the chat template leaves answers out, so where one ends is not known")

    def _common(self, token_ids: Sequence[int], have: str, wanted: str) -> tuple[int, int]:
        """Return how many leading tokens agree with `wanted`, and how many characters they have."""
        same = _agreement(have, wanted)
        sizes = range(len(token_ids) + 1)
        count = bisect_right(sizes, same, key=lambda k: len(self._text(token_ids[:k]))) - 1
        # The last token may end within a character: go back until the text is a prefix.
        while not wanted.startswith(text := self._text(token_ids[:count])):
            count -= 1
        return count, len(text)

    def placed(
        self, token_ids: Sequence[int], images: Sequence[SeenImage], start: int = 0
    ) -> tuple[PlacedImage, ...]:
        """Return the places of images among tokens that begin at position `start` of a chat. Raises
        ValueError where tokens of images belong to none."""
        return self.placer.placed(token_ids, images, start) if self.placer else ()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of text within a chat."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _text(self, token_ids: Sequence[int]) -> str:
        """Return the normalised text of tokens: given text is normalised already, sampled may not be."""
        return self._normal(self._decode(token_ids))

    def _normal(self, text: str) -> str:
        normalizer = self._tokenizer.backend_tokenizer.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


def make_template(
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int] = (),
    *,
    rule: DriftRule = "new",
    options: Mapping[str, Any] | None = None,
    placer: ImagePlacer | None = None,
) -> ChatTemplate:
    """Return the template of a checkpoint. Raises ConfigError for an option that it does not read."""
    try:
        return ChatTemplate(tokenizer, stop_token_ids, rule, options, placer)
    except ValueError as error:
        raise ConfigError(f"{error}.") from error


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of text that begins a sequence, including the tokenizer's beginning token.
    Text from a template may hold that token already, which then occurs once."""
    begin = str(getattr(tokenizer, "bos_token", None) or "")
    has_begun = bool(begin) and text.startswith(begin)
    return list(tokenizer.encode(text, add_special_tokens=not has_begun))


def _agreement(one: str, other: str) -> int:
    """Return the number of leading characters that two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a message."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


def _marked_answers(messages: Sequence[Message], called: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield answers that may precede the messages, each ending with a mark. called: the names of the
    functions that the answer called."""
    first = messages[0] if messages else {}
    if first.get("role") == "tool":
        name = first.get("name") or next(iter(called), "f")
        function = {"name": name, "arguments": json.dumps({"x": _MARK})}
        call = {"type": "function", "id": first.get("tool_call_id", ""), "function": function}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
    yield {"role": "assistant", "content": _MARK}
