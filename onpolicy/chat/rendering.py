"""Rendering of a chat as text by its template, with checks that nothing is left out.

Templates that know four roles write nothing for a fifth, and raise no error: the policy never sees
the instruction (sgl-project/sglang#40082 and ollama/ollama#18305). `left_out` finds such messages by
rendering marks in the places of their words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from onpolicy.chat.bounded import bound_templates
from onpolicy.chat.messages import (
    FORMS,
    CallForm,
    Message,
    for_template,
    images_of,
    names_called,
    replaced,
    role_in,
    texts_of,
)
from onpolicy.errors import in_one_line
from onpolicy.images.placing import ImagePlacer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TEMPLATE = "the checkpoint's tokenizer has no chat template"

OURS = {
    "messages", "conversation", "tools", "chat_template", "tokenize", "add_generation_prompt",
    "continue_final_message", "return_dict", "return_tensors", "padding", "truncation", "max_length",
}  # fmt: skip
"""The arguments of `apply_chat_template` that are no variables of a template."""

_SAID_MARKER = chr(0x10FF7F)
"""A character of the last private-use plane, in place of a marker that the policy itself sampled."""


class ChatRenderer:
    """The template of a tokenizer, applied as SGLang's chat endpoint does. options: variables of
    the template beside its messages and tools, such as enable_thinking. placer: expands images that
    were read; None: there are none. Raises ValueError for an option that the template does not read;
    all methods raise it for messages that the template refuses."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any] | None = None,
        placer: ImagePlacer | None = None,
    ):
        bound_templates()
        self._tokenizer, self._options = tokenizer, dict(options or {})
        self.placer = placer
        for name in self._options:
            self._require_option(name)

    @property
    def _source(self) -> str:
        return str(self._tokenizer.chat_template or "")

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text of a chat that the policy continues. Raises ValueError where the template
        leaves out tools, a call, or the words of anybody but the assistant."""
        text = self._render(messages, tools, begins=True)
        if tools and text == self._render(messages, (), begins=True):
            raise ValueError("has tools, and the chat template writes none of them")
        for name in names_called(messages):
            if name not in text:
                raise ValueError(f"the chat template leaves out the call of {name!r}")
        words = [texts_of(message.get("content")) for message in messages]
        if not all(said.strip() in text for texts in words for said in texts):
            self._require_heard(messages, tools)
        return text

    def _require_heard(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        """Raise ValueError for the first message that the template leaves out."""
        render = partial(self._render, tools=tools, begins=True)
        if unheard := left_out(messages, render):
            message = messages[unheard[0]]
            words = " ".join(texts_of(message["content"])).strip()
            raise ValueError(
                f"the chat template leaves out what role={message['role']} says ({words!r:.40}). Give "
                "it another role"
            )

    def whole(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text of a complete chat, without a generation prompt."""
        return self._render(messages, tools, goes_on=False)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], **frame: bool
    ) -> str:
        """Return the template's text for messages, with the texts of their images' tokens."""
        if self.placer is None:
            return self._written(messages, tools, **frame)
        hidden = {self.placer.marker: _SAID_MARKER}
        messages = [
            replaced(message, hidden) if message.get("role") == "assistant" else message
            for message in messages
        ]
        text = self._written(messages, tools, **frame)
        text = self.placer.expanded(text, images_of(messages))
        return text.replace(_SAID_MARKER, self.placer.marker)

    def _written(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        goes_on: bool = True,
        begins: bool = False,
    ) -> str:
        """Return the template's text for messages, in the first form of calls that it writes.
        goes_on: whether an answer is to follow. begins: whether a last message by the assistant is
        the beginning of that answer."""
        if not self._source:
            raise ValueError(NO_TEMPLATE)
        last = messages[-1] if messages else {}
        continues = begins and last.get("role") == "assistant" and not last.get("tool_calls")
        more: dict[str, Any] = {"add_generation_prompt": goes_on and not continues}
        if continues:
            more["continue_final_message"] = True
        called, first = names_called(messages), ""
        errors: list[Exception] = []
        for form in FORMS if called else FORMS[:1]:
            try:
                text = self._apply(messages, tools, more, form)
            except Exception as error:  # a template is a program of the checkpoint's
                errors.append(error)
                continue
            if all(name in text for name in called):
                return text
            first = first or text
        if first:
            return first
        raise ChatRefusedError(in_one_line(errors[0])) from errors[0]

    def _apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        more: Mapping[str, Any],
        form: CallForm,
    ) -> str:
        plain = [for_template(message, form) for message in messages]
        for message in plain:
            if "role" in message:
                message["role"] = role_in(self._source, message["role"])
        return str(
            self._tokenizer.apply_chat_template(
                plain,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                **more,
                **self._options,
            )
        )

    def _require_option(self, name: str) -> None:
        if name in OURS:
            raise ValueError(f"--chat-template-kwargs: {name!r} is set by onpolicy. Leave it out")
        if not re.search(rf"\b{re.escape(name)}\b", self._source):
            raise ValueError(
                f"--chat-template-kwargs: the chat template reads no variable {name!r}. Correct the "
                "name, or leave it out"
            )


class ChatRefusedError(ValueError):
    """Messages that a chat template refuses; `reason` is the template's message."""

    def __init__(self, reason: str):
        super().__init__(f"the chat template refuses the messages: {reason}")
        self.reason = reason


def left_out(
    messages: Sequence[Message], render: Callable[[list[dict[str, Any]]], str]
) -> list[int]:
    """Return the indices of the messages whose words a chat template leaves out.

    render: renders messages to text. Words are searched by a mark in their place, since templates
    trim them, or write them as JSON. Messages without words are skipped, and so are the
    assistant's, whose earlier thinking and words beside a call templates drop on purpose. A
    template that takes the words and not the marks (it may want JSON there) is assumed to write
    them."""
    asked = [i for i, message in enumerate(messages) if _has_words(message)]
    marked: list[dict[str, Any]] = [dict(message) for message in messages]
    for i in asked:
        parts, mark = marked[i]["content"], _mark(i)
        marked[i]["content"] = (
            [{**part, "text": mark} if "text" in part else part for part in parts]
            if isinstance(parts, list)
            else mark
        )
    try:
        text = render(marked).upper()
    except Exception:  # a template is a program of the checkpoint's
        return []
    return [i for i in asked if _mark(i) not in text]


def _has_words(message: Message) -> bool:
    content = message.get("content")
    has_words = isinstance(content, (str, list)) and any(map(str.strip, texts_of(content)))
    return message.get("role") != "assistant" and has_words


def _mark(number: int) -> str:
    return f"WORDSOFMESSAGE{number}END"
