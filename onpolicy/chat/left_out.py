"""Messages whose words a chat template leaves out, found by rendering marks in their places.

Templates that know four roles write nothing for a fifth, and say nothing: the policy is asked without
the instruction. See sgl-project/sglang#40082 and ollama/ollama#18305.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onpolicy.chat.messages import Message


def left_out(
    messages: Sequence[Message], render: Callable[[list[dict[str, Any]]], str]
) -> list[int]:
    """Return the numbers of the messages, counted from 0, whose words a chat template leaves out.

    render: what makes one text of messages. Words are looked for by a mark in their place, since
    templates trim them, or write them as JSON. Not looked at are messages without words and those of
    the assistant, whose earlier thinking and words beside a call templates drop on purpose. A template
    that takes the words and not the marks (it may want JSON there) is taken to write them.
    """
    asked = [i for i, message in enumerate(messages) if _has_words(message)]
    marked: list[dict[str, Any]] = [dict(message) for message in messages]
    for i in asked:
        marked[i]["content"] = _mark(i)
    try:
        text = render(marked).upper()
    except Exception:  # a template is a program of the checkpoint's
        return []
    return [i for i in asked if _mark(i) not in text]


def _has_words(message: Message) -> bool:
    content = message.get("content")
    return message.get("role") != "assistant" and isinstance(content, str) and bool(content.strip())


def _mark(number: int) -> str:
    return f"WORDSOFMESSAGE{number}END"
