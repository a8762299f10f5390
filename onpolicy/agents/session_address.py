"""Address of a gateway session, which a prompt's metadata bring to whatever acts in it."""

from __future__ import annotations

from dataclasses import dataclass

from onpolicy.types import Prompt

SESSION = "onpolicy: session"
"""The field of a prompt's metadata with its session, which no row has."""


def session_of(prompt: Prompt) -> SessionAddress:
    """Return the address of the session of a prompt's episode."""
    return SessionAddress(**prompt.metadata[SESSION])


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAddress:
    """The address that a client needs: it acts in one episode, while that lasts."""

    base_url: str
    api_key: str
    model: str
