"""Detection of messages whose words a chat template leaves out, by rendering marks in their places.

Templates that know four roles write nothing for a fifth, and raise no error: the policy never sees
the instruction. See sgl-project/sglang#40082 and ollama/ollama#18305.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onpolicy.chat.messages import Message


def left_out(
    messages: Sequence[Message], render: Callable[[list[dict[str, Any]]], str]
) -> list[int]:
    """Return the indices of the messages whose words a chat template leaves out.

    render: renders messages to text. Words are searched by a mark in their place, since templates
    trim them, or write them as JSON. Messages without words are skipped, and so are the
    assistant's, whose earlier thinking and words beside a call templates drop on purpose. A
    template that takes the words and not the marks (it may want JSON there) is assumed to write
    them.
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
