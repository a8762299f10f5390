"""An agent of the user's own, which knows an API by its base URL and key, rolls prompts out."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from onpolicy.agents.gateway.server import Gateway, OpenSession
from onpolicy.rollout.episodes import Episode, Rollouter, Turns
from onpolicy.types import Prompt

Agent = Callable[[str, str, Prompt], Any]
"""(base URL, key, prompt) -> reward, episode or None; a coroutine function or one that blocks."""

Act = Callable[[OpenSession, Prompt], Awaitable[Any]]
"""Has an agent act in a session: what it returned."""


class AgentRollouter(Rollouter):
    """Opens a session of the gateway for each episode, and has an agent act in it.

    `act` says where the agent runs. It may return a reward, None if the run's reward function is to say
    it, or an Episode with rewards, metrics and info, to which the session adds the trajectories.
    """

    def __init__(self, gateway: Gateway, act: Act):
        self.gateway, self._act = gateway, act

    async def roll_out(self, prompt: Prompt, turns: Turns) -> Episode:
        opened = await self.gateway.open(turns)
        try:
            found = await self._act(opened, prompt)
        finally:
            branches = await self.gateway.end(opened)
        return replace(
            _episode_of(found),
            trajectories=branches,
            metrics={**opened.session.metrics, **_episode_of(found).metrics},
        )


def _episode_of(found: Any) -> Episode:
    if isinstance(found, Episode):
        if found.trajectories is not None:
            raise ValueError("trajectories: those of an agent are its session's. Leave them out.")
        return found
    if found is None:
        return Episode()
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise TypeError(
            f"the agent returned {found!r:.80}: it must be a reward, an Episode, or None"
        )
    return Episode(reward=float(found))


def in_thread(agent: Agent) -> Act:
    """Have it act in a thread of its own, so that one that blocks holds nobody up.

    A thread cannot be ended: one whose episode is over is refused by the gateway from there on.
    """

    async def act(opened: OpenSession, prompt: Prompt) -> Any:
        given = (opened.base_url, opened.api_key, prompt)
        return await _call_in_thread(partial(_run, agent, *given))

    return act


def _run(agent: Agent, *given: Any) -> Any:
    found = agent(*given)
    return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found


async def _awaited(found: Awaitable[Any]) -> Any:
    return await found


async def _call_in_thread(function: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()

    def tell(set_it: Callable[[Any], None], value: Any) -> None:
        if not outcome.done():
            set_it(value)

    def run() -> None:
        try:
            told = partial(tell, outcome.set_result, function())
        except (Exception, SystemExit) as error:
            told = partial(tell, outcome.set_exception, _for_a_future(error))
        loop.call_soon_threadsafe(told)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await outcome


def _for_a_future(error: BaseException) -> BaseException:
    """A future takes no StopIteration, and SystemExit would end the loop."""
    if isinstance(error, (StopIteration, SystemExit)):
        return RuntimeError(f"the agent raised {type(error).__name__}: {error}")
    return error
