"""Episode functions that act through a gateway session, wherever they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from onpolicy.agents.gateway.rollouter import AgentRollouter
from onpolicy.agents.gateway.server import Gateway, OpenSession
from onpolicy.rollout.episodes import Episode, Rollouter
from onpolicy.types import Prompt

_SESSION = "session"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAddress:
    """The address that a client needs: it acts in one episode, while that lasts."""

    base_url: str
    api_key: str
    model: str


def acts_by(rollouter: Rollouter, make_gateway: Callable[[], Gateway]) -> AgentRollouter:
    """Return a rollouter that passes prompts to `rollouter` with a session for `session_of` in
    each."""

    async def act(opened: OpenSession, prompt: Prompt) -> Episode:
        rules = opened.session.rules
        address = SessionAddress(
            base_url=opened.base_url, api_key=opened.api_key, model=rules.model_name
        )
        told = replace(prompt, metadata={**prompt.metadata, _SESSION: asdict(address)})
        return await rollouter.roll_out(told, opened.session.turns)

    return AgentRollouter(make_gateway, act, rollouter)


def session_of(prompt: Prompt) -> SessionAddress:
    """Return the address of the session of a prompt's episode."""
    return SessionAddress(**prompt.metadata[_SESSION])
