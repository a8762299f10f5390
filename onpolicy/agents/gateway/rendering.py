"""What the gateway asks of chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from onpolicy.agents.gateway.calls import Message


class Renderer(Protocol):
    """Messages and text into tokens. Its functions raise ValueError for what the template refuses."""

    vocab_size: int

    def canonical(self, message: Message) -> Any:
        """What of a message has to be equal for it to be the same, as JSON can say it."""

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a chat that the policy is to go on with."""

    def go_on(
        self,
        token_ids: Sequence[int],
        known: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[int, list[int]]:
        """How many of the tokens of a known chat a longer one keeps, and what it has after them.

        `known`: the messages of the tokens, the last of them sampled; `messages`: all.
        """

    def encode(self, text: str, *, begins: bool) -> list[int]:
        """Text as tokens; `begins`: with those that a sequence begins with."""
