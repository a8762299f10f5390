"""Protocols of clients, one module each: reading of requests and writing of responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from onpolicy.agents.gateway.calls import Call, Reply
from onpolicy.agents.gateway.fields import Fields
from onpolicy.agents.gateway.refusals import RefusedError

Event = tuple[str, Any]
"""(name of a server-sent event, "" where it has none; its data)"""


class WireProtocol(Protocol):
    """The interface of a protocol module."""

    PATH: str

    def read(self, fields: Fields) -> Call:
        """Return the call in a request. Raises RefusedError."""

    def answer(self, call: Call, replies: Sequence[Reply]) -> dict[str, Any]:
        """Return the body of the response."""

    def events(self, call: Call, replies: Sequence[Reply]) -> Iterator[Event]:
        """Yield the response as a stream."""

    def error(self, refused: RefusedError) -> dict[str, Any]:
        """Return the body of a refusal."""
