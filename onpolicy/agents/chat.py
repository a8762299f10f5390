"""Chats as tokens: rendered by the tokenizer's own template, and continued as they were sampled.

A template is a program: given the whole chat again it may write the past anew. It drops earlier
thinking, merges the results of tools, serialises the arguments of a call in its own way, trims, or ends
an answer with another token than the one that was sampled. Rebuilt from text, such a chat has other
tokens than those that the policy saw and sampled. So a chat is never rebuilt here: what comes after its
tokens is the rest of the text that the template makes, tokenised alone. Where that text does not begin
with the text of the tokens, the template drifts, and a rule says what becomes of it (`DriftRule`).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""As OpenAI has it: a role, a content (text, or parts of text), maybe reasoning_content, tool_calls
(their arguments are JSON in a string) and tool_call_id."""

DriftRule = Literal["new", "keep", "refuse"]
"""Where a template writes the past anew: begin a new trajectory at the first token that differs, keep
the tokens as they are, or raise ChatDriftError."""

_MARK = "(the end of this answer)"
"""Stands for an answer whose end is looked for in what a template makes."""


class ChatDriftError(ValueError):
    """A template writes the past of a chat anew, and the rule is to refuse that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Where a template would have a chat differ from its tokens."""

    token: int
    """The first token that differs, counted from 0."""

    had: str
    """What the tokens say from there on, at most 40 characters."""

    wants: str
    """What the template says instead."""

    def __str__(self) -> str:
        return (
            f"token {self.token}: the chat has {self.had!r}, and its template says {self.wants!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """How a chat goes on."""

    kept: int
    """How many of its tokens stay, from the first on: all, unless the rule is a new trajectory."""

    token_ids: list[int]
    """What is given after them."""

    drift: Drift | None = None


class ChatTemplate:
    """The template of a tokenizer, as SGLang's chat endpoint applies it.

    `stop_token_ids`: what ends an answer. `options`: further variables of the template, such as
    enable_thinking. All functions raise ValueError for what the template does not take.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        rule: DriftRule = "new",
        options: Mapping[str, Any] | None = None,
    ):
        self._tokenizer, self.rule, self._options = tokenizer, rule, dict(options or {})
        self._stops = {self._decode([token]) for token in stop_token_ids}
        added = tokenizer.get_added_vocab().values()
        self._special = {self._decode([token]) for token in added} | self._stops
        self.vocab_size = len(tokenizer)

    def begin(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The tokens of a chat that the policy is to go on with."""
        return self.encode(self._render(messages, tools))

    def answer(
        self,
        known: Sequence[Message],
        answer: Message,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The tokens of an answer to the messages before it, as a policy would have sampled it: from the
        end of `begin` to the stop token that ends it."""
        before = self._render(known, tools)
        whole = self._render([*known, answer], tools, goes_on=False)
        text = whole.removeprefix(before)
        ends = [text.index(stop) + len(stop) for stop in self._stops if stop in text]
        if not whole.startswith(before) or not ends:
            raise ValueError(
                "the chat template has an answer not after its own beginning, or ends it with no stop "
                "token, so what is to be learnt is not known"
            )
        return self.encode(text[: min(ends)])

    def go_on(
        self,
        token_ids: Sequence[int],
        known: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Continuation:
        """How a chat goes on after an answer.

        token_ids: the chat so far, which ends with the answer as it was sampled. known: its messages,
        the answer being the last. messages: the new ones.
        """
        have = self._text(token_ids)
        wanted = self._normal(self._render([*known, *messages], tools))
        if wanted.startswith(have):
            return Continuation(kept=len(token_ids), token_ids=self.encode(wanted[len(have) :]))
        kept, length = self._common(token_ids, have, wanted)
        drift = Drift(token=kept, had=have[length:][:40], wants=wanted[length:][:40])
        if self.rule == "refuse":
            raise ChatDriftError(f"--chat-drift refuse: {drift}.")
        if self.rule == "keep":
            more = self.after_answer(token_ids, messages, tools)
            return Continuation(kept=len(token_ids), token_ids=more, drift=drift)
        return Continuation(kept=kept, token_ids=self.encode(wanted[length:]), drift=drift)

    def after_answer(
        self,
        token_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """What the template adds for messages after an answer, whatever came before it.

        It begins with the end of the answer, unless the last of `token_ids` has ended it: a stop token
        that is also what the template has there comes once.
        """
        rest = self._after_mark(messages, tools)
        if self._decode(token_ids[-1:]) in self._stops:
            ends = [text for text in self._special if rest.startswith(text)]
            rest = rest.removeprefix(max(ends, key=len, default=""))
        return self.encode(rest)

    def _after_mark(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """What the template makes from the end of an answer on."""
        for answer in _marked_answers(messages):
            text = self._render([{"role": "user", "content": "?"}, answer, *messages], tools)
            if _MARK in text:
                rest = text[text.rindex(_MARK) + len(_MARK) :]
                ends = [rest.index(stop) for stop in self._stops if stop in rest]
                return rest[min(ends) :] if ends and answer.get("tool_calls") else rest
        raise ValueError("the chat template leaves answers out, so where one ends is not known")

    def _common(self, token_ids: Sequence[int], have: str, wanted: str) -> tuple[int, int]:
        """How many tokens from the first on say what is wanted, and in how many characters."""
        pairs = enumerate(zip(have, wanted, strict=False))
        same = next((i for i, (one, other) in pairs if one != other), min(len(have), len(wanted)))
        sizes = range(len(token_ids) + 1)
        count = bisect_right(sizes, same, key=lambda k: len(self._text(token_ids[:k]))) - 1
        while not wanted.startswith(text := self._text(token_ids[:count])):
            count -= 1
        return count, len(text)

    def encode(self, text: str, *, begins: bool = False) -> list[int]:
        """Text as tokens; `begins`: with those that a sequence begins with."""
        return list(self._tokenizer.encode(text, add_special_tokens=begins))

    def _text(self, token_ids: Sequence[int]) -> str:
        """What tokens say, in the form that text is brought into before it becomes tokens: what was
        given has it already, and what was sampled may not."""
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

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        goes_on: bool = True,
    ) -> str:
        """Arguments of calls are objects, as most templates want them, or text, as DeepSeek's does.

        goes_on: whether an answer is to follow.
        """
        if self._tokenizer.chat_template is None:
            raise ValueError("the checkpoint's tokenizer has no chat template")
        flat = [{**message, "content": text_of(message.get("content"))} for message in messages]
        try:
            return self._apply([_with_objects(message) for message in flat], tools, goes_on)
        except Exception as error:  # a template is a program of the checkpoint's
            try:
                return self._apply(flat, tools, goes_on)
            except Exception:
                raise ValueError(f"the chat template refuses the messages: {error}") from error

    def _apply(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], goes_on: bool
    ) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=goes_on,
                **self._options,
            )
        )


def _marked_answers(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Answers that messages may come after, which end with a mark."""
    first = messages[0] if messages else {}
    if first.get("role") == "tool":
        function = {"name": first.get("name") or "f", "arguments": json.dumps({"x": _MARK})}
        call = {"type": "function", "id": first.get("tool_call_id", ""), "function": function}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
    yield {"role": "assistant", "content": _MARK}


def text_of(content: Any) -> Any:
    """The content of a message, parts of text joined. Raises ValueError for parts of another kind."""
    if not isinstance(content, (list, tuple)):
        return content
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"content part of type={kind!r}: this model reads text alone")
        texts.append(part["text"])
    return "".join(texts)


def exactly(message: Message) -> Any:
    """What of a message is equal where a client returned it unchanged."""
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    named = [[call.get("name"), call.get("arguments")] for call in calls]
    thinking, answers = message.get("reasoning_content"), message.get("tool_call_id")
    content = text_of(message.get("content"))
    return [message.get("role"), content or "", named, thinking or "", answers or ""]


def loosely(message: Message) -> Any:
    """What of a message is equal where a client returned it with the same meaning: with other space
    around the content, arguments serialised anew, or without the thinking."""
    calls = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    named = [[call.get("name"), _object(call.get("arguments"))] for call in calls]
    return [message.get("role"), str(text_of(message.get("content")) or "").strip(), named]


def _object(arguments: Any) -> Any:
    """JSON in a string as what it says; another string as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    parsed = [
        {
            **call,
            "function": {**call["function"], "arguments": _object(call["function"]["arguments"])},
        }
        for call in calls
    ]
    return {**message, "tool_calls": parsed}
