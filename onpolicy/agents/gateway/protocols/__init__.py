"""The protocols that clients speak, a module each: what is asked for, and how it is answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from onpolicy.agents.gateway.calls import Call, Reply
from onpolicy.agents.gateway.errors import RefusedError
from onpolicy.agents.gateway.fields import Fields
from onpolicy.types import SamplingParams

Event = tuple[str, Any]
"""(name of a server-sent event, "" where it has none; its data)"""


class WireProtocol(Protocol):
    """What such a module has."""

    PATH: str

    def read(self, fields: Fields, params: SamplingParams) -> Call:
        """What is asked for, where a run samples with `params`. Raises RefusedError."""

    def answer(self, call: Call, replies: Sequence[Reply]) -> dict[str, Any]:
        """The body of the response."""

    def events(self, call: Call, replies: Sequence[Reply]) -> Iterator[Event]:
        """The same as a stream."""

    def error(self, refused: RefusedError) -> dict[str, Any]:
        """The body of a refusal."""
