"""Text of a sample for a judge: words and who said them, without the control tokens of any model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from onpolicy.chat.messages import text_of
from onpolicy.types import Prompt, Sample

_CONTROL_TOKEN = re.compile(
    r"<(?=[|\uff5c]\w|\w{1,32}\|>|/?(?:s|bos|eos|pad|start_of_turn|end_of_turn)>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\])"
)
"""The first character of anything that a judge's tokenizer may take for a control token."""


def words_of(sample: Sample) -> dict[str, str]:
    """Return the text for each placeholder in a judge's prompt.

    `prompt`: the messages, each with its role, or only the words if there is one message, by the
    user; `question`: the words of the user's last message, or the prompt if there is none;
    `response`, `label`.
    """
    of = {
        "prompt": _conversation(sample.prompt),
        "question": _question(sample.prompt),
        "response": sample.response,
        "label": sample.prompt.label,
    }
    return {name: without_control_tokens(text) for name, text in of.items()}


def without_control_tokens(text: str) -> str:
    """Return text with a space inserted in every control token. Example: '<|end|>' -> '< |end|>'

    A policy may write one in ordinary letters, and the judge's server would parse it as a turn.
    """
    return _CONTROL_TOKEN.sub(lambda found: f"{found[0]} ", text)


def _conversation(prompt: Prompt) -> str:
    if not prompt.messages:
        return prompt.text
    (first, *more) = prompt.messages
    if first.get("role") == "user" and not more:
        return _words(first)
    return "\n\n".join(f"{each.get('role')}: {_words(each)}" for each in prompt.messages)


def _question(prompt: Prompt) -> str:
    asked = [_words(each) for each in prompt.messages or () if each.get("role") == "user"]
    return asked[-1] if asked else _conversation(prompt)


def _words(message: Mapping[str, Any]) -> str:
    """Return the content of a message, and a line for each tool that it calls."""
    calls = [call.get("function") or call for call in message.get("tool_calls") or ()]
    lines = [
        text_of(message.get("content")) or "",
        *(f"calls {call.get('name')} {_json(call)}" for call in calls),
    ]
    return "\n".join(filter(None, lines))


def _json(call: Mapping[str, Any]) -> str:
    arguments = call.get("arguments") or {}
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
