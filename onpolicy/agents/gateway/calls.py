"""Calls and replies of clients, independent of the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = Mapping[str, Any]
"""A message in the form that chat templates read: role, content (text, or parts of it and of images,
whose `image` is an `UnreadImage` until a session reads it), and maybe
reasoning_content, tool_calls (their arguments are JSON in a string), tool_call_id and name."""


@dataclass(frozen=True, slots=True)
class UnreadImage:
    """An image as a client sent it."""

    said: Any
    """Its part of the message."""

    where: str
    """The part's name, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request of a client."""

    model: str

    messages: tuple[Message, ...] = ()
    """The whole chat, from its beginning."""

    continues: str = ""
    """The name of an earlier reply, whose chat comes before `messages`."""

    prompt: str | tuple[int, ...] | None = None
    """A prompt to continue in place of messages: text or tokens."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools as OpenAI describes functions; they are rendered into the prompt."""

    forces_call: bool = False
    """Whether the answer has to call a tool."""

    named_tool: str = ""
    """The tool that the answer must call; empty: any of them."""

    one_call: bool = False
    """Whether the answer may make at most one call."""

    num_answers: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    stop: tuple[str, ...] = ()
    json_schema: str = ""
    """The JSON schema that the answer must match; empty: none."""

    streams: bool = False
    streams_usage: bool = False
    log_probs: bool = False
    packs_reasoning: bool = False
    """Whether the response includes the reasoning packed, too."""

    token_ids: bool = False
    """Whether the response includes the token ids."""

    @property
    def calls_or_formats(self) -> bool:
        """Whether the answer calls tools or is in a format, as the policy likes."""
        return bool(self.tools and self.json_schema) and not self.forces_call

    @property
    def decisive(self) -> tuple[Any, ...]:
        """The values on which the answer depends, in a form that JSON can hold."""
        calls = {"forced": self.forces_call, "named": self.named_tool, "one": self.one_call}
        return (
            self.messages, self.continues, self.prompt, self.tools, self.max_tokens, self.temperature,
            self.stop, *filter(None, [self.json_schema, calls if any(calls.values()) else None]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function that the policy calls."""

    id: str
    name: str
    arguments: str
    """JSON"""


Ending = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer to a call."""

    name: str
    """The name, a digest of the call and of what it continues: the same in a repeated run."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    ending: Ending = "stop"
    stopped_by: str = ""
    """The entry of `Call.stop` that ended it, which is not part of `content`."""

    prompt_ids: Sequence[int] = field(default=(), repr=False)
    """The given and sampled tokens before it."""

    token_ids: Sequence[int] = ()
    """The sampled tokens, the stop token included."""

    log_probs: Sequence[float] = ()
    token_texts: Sequence[str] = ()
    """The text of each token, where log-probabilities were requested."""

    token_bytes: Sequence[bytes] = field(default=(), repr=False)
    """The bytes of each token, which may be a part of a character; joined, the text's UTF-8."""

    @property
    def message(self) -> dict[str, Any]:
        """The message, in the form in which a client sends it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message
