"""Rollouts by a user's agent, which knows an API by its base URL and key.

The agent runs in a thread of this process (`in_thread`), or is an episode function that acts through
a gateway session wherever it runs (`acts_by`).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from onpolicy.agents.gateway.gateway_server import Gateway, OpenSession
from onpolicy.agents.session_address import SESSION, SessionAddress
from onpolicy.errors import AgentError
from onpolicy.rollout.episode_loop import episode_loop
from onpolicy.rollout.rollouter import Episode, Rollouter, Turns
from onpolicy.types import Prompt

Agent = Callable[[str, str, Prompt], Any]
"""(base URL, key, prompt) -> reward, episode or None; a coroutine function or one that blocks."""

Act = Callable[[OpenSession, Prompt], Awaitable[Any]]
"""A function that has an agent act in a session, and returns the agent's result."""


class AgentRollouter(Rollouter):
    """A rollouter that opens a gateway session for each episode, and has an agent act in it.

    `make_gateway` is called for the first episode. `act` runs the agent; it may return a reward,
    None to have the run's reward function compute it, or an Episode with rewards, metrics and info,
    to which the session adds the trajectories. `inner`: a rollouter in which the agents run, to be
    started and closed with this one.
    """

    def __init__(
        self, make_gateway: Callable[[], Gateway], act: Act, inner: Rollouter | None = None
    ):
        self._make_gateway, self._act, self._inner = make_gateway, act, inner
        self._gateway: Gateway | None = None

    async def ready(self) -> None:
        if self._inner is not None:
            await self._inner.ready()

    def close(self) -> None:
        """End all sessions, and close the gateway. Not callable from the episode loop."""
        if self._inner is not None:
            self._inner.close()
        if self._gateway is not None:
            with suppress(TimeoutError):  # a function of the user's holds the loop up
                episode_loop().run(self._gateway.close)

    async def roll_out(self, prompt: Prompt, turns: Turns) -> Episode:
        gateway = self._gateway = self._gateway or self._make_gateway()
        opened = await gateway.open(turns)
        try:
            found = Episode.of(await self._act(opened, prompt))
            await opened.session.settle()
        finally:
            branches = await gateway.end(opened)
        if (drift := opened.session.refused_drift) is not None:
            raise AgentError(f"acted in a chat that drifts: {drift}", reason="drift") from drift
        if found.trajectories is not None:
            raise AgentError(
                "returned trajectories: those of an agent are its session's. Leave them out.",
                reason="result",
            )
        metrics = {**opened.session.metrics, **found.metrics}
        drifts = dict(sorted(opened.session.drifts.items()))
        info = {**({"gateway/drifts": drifts} if drifts else {}), **found.info}
        return replace(found, trajectories=branches, metrics=metrics, info=info)


def in_thread(agent: Agent) -> Act:
    """Return an `act` that runs the agent in a thread of its own, where it may block.

    A thread cannot be killed: the gateway refuses its requests once its episode is over.
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
    """Return an error that a future accepts and that does not end the loop."""
    if isinstance(error, (StopIteration, SystemExit)):
        return RuntimeError(f"the agent raised {type(error).__name__}: {error}")
    return error


def acts_by(
    rollouter: Rollouter, make_gateway: Callable[[], Gateway], at_once: int | None = None
) -> AgentRollouter:
    """Return a rollouter that hands `rollouter` prompts, each with a session in it.

    at_once: the most episodes that act at a time. Waiting for a place is none of an episode's time."""
    places = asyncio.Semaphore(at_once) if at_once else None

    async def act(opened: OpenSession, prompt: Prompt) -> Episode | None:
        rules = opened.session.rules
        address = SessionAddress(
            base_url=opened.base_url, api_key=opened.api_key, model=rules.model_name
        )
        told = replace(prompt, metadata={**prompt.metadata, SESSION: asdict(address)})
        turns = opened.session.turns
        if places is None:
            return await rollouter.roll_out(told, turns)
        await turns.episode.wait_for(places)
        try:
            return await rollouter.roll_out(told, turns)
        finally:
            places.release()

    return AgentRollouter(make_gateway, act, rollouter)
