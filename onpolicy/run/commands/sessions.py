"""Sessions that clients open and end themselves, to try an agent without a run.

`POST /sessions` opens a session and returns its id, base URL and key. `DELETE /sessions/ID` ends it and
returns its samples. Both need the key of the servers that sample.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any

import aiohttp
from aiohttp import web

from onpolicy.agents.gateway.errors import RefusedError
from onpolicy.agents.gateway.rollouter import AgentRollouter
from onpolicy.agents.gateway.server import Gateway, OpenSession, has_key
from onpolicy.outputs import trajectories
from onpolicy.rollout.client import EngineClient
from onpolicy.rollout.episode_loop import episode_loop
from onpolicy.rollout.episode_rules import EpisodeRules
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.seeds import sampling_seed
from onpolicy.rollout.turns import Ask, Turns
from onpolicy.trajectory import Trajectory
from onpolicy.types import Prompt, Request, SamplingParams


class ServedSession:
    """An episode that is open until its client ends it, or for `time_limit` seconds."""

    def __init__(self, engine: EngineClient, time_limit: float):
        self._engine, self._time_limit = engine, time_limit
        self.opened: asyncio.Future[OpenSession] = asyncio.get_running_loop().create_future()
        self.is_to_end, self.has_ended = asyncio.Event(), asyncio.Event()

    async def act(self, opened: OpenSession, prompt: Prompt) -> None:
        """Keep the session open, in the place of an agent."""
        self.opened.set_result(opened)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.is_to_end.wait(), self._time_limit)

    def asked(self, branch: Turns) -> None:
        if (ask := branch.ask) is not None:
            episode_loop().begin(partial(self._answer, branch, ask))

    async def _answer(self, branch: Turns, ask: Ask) -> None:
        """Have the engine sample all tokens of a request; pass an error on to the client that waits."""
        is_answered = False
        try:
            async with aiohttp.ClientSession() as connection:
                while not is_answered and branch.ask is ask:
                    request = branch.episode.request(branch, ask)
                    completion = await self._engine.generate(connection, request)
                    is_answered = branch.episode.add(branch, ask, completion)
        except Exception as error:  # else the client would wait for ever
            branch.episode.withdraw(branch, ask)
            if not ask.answered.done():
                ask.answered.set_exception(error)

    def ended(self, episode: OpenEpisode) -> None:
        self.has_ended.set()


class ServedSessions:
    """The open sessions of one gateway.

    Samples are a function of `seed`, of the number of sessions opened before, and of the requests.
    """

    def __init__(
        self,
        gateway: Gateway,
        engines: Sequence[EngineClient],
        *,
        api_keys: Sequence[str],
        params: SamplingParams,
        rules: EpisodeRules,
        seed: int,
        time_limit: float,
    ):
        self.gateway, self._engines, self._api_keys = gateway, engines, api_keys
        self._params, self._rules, self._seed = params, rules, seed
        self._time_limit = time_limit
        self._numbers = itertools.count()
        self._known: dict[str, tuple[ServedSession, OpenEpisode]] = {}
        gateway.routes = [
            web.post("/sessions", self._answered(self._open)),
            web.delete("/sessions/{name}", self._answered(self._end)),
        ]

    def start(self) -> None:
        """Start to listen. Raises OSError if the gateway cannot."""
        episode_loop().run(self.gateway.start)

    def close(self) -> None:
        """End all sessions and stop listening."""
        for _, episode in list(self._known.values()):
            episode.end()
        episode_loop().run(self.gateway.close)

    def _answered(self, handle: Callable[[web.Request], Any]) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.Response:
            try:
                if not has_key(request, *self._api_keys):
                    raise RefusedError(
                        401,
                        "Sessions are opened and ended with the key of the servers.",
                        code="invalid_api_key",
                    )
                return web.json_response(await handle(request))
            except RefusedError as refused:
                return web.json_response(refused.as_openai(), status=refused.status)

        return answer

    async def _open(self, _: web.Request) -> dict[str, str]:
        """Open a session with its own episode number, by which observations and failures are kept."""
        number = next(self._numbers)
        session = ServedSession(self._engines[number % len(self._engines)], self._time_limit)
        rollouter = AgentRollouter(lambda: self.gateway, session.act)
        seed = sampling_seed(self._seed, "session", number)
        request = Request(prompt_ids=[], sampling_seed=seed, params=self._params)
        prompt = Prompt(index=number, prompt_ids=[], label="", text="")
        episode = OpenEpisode(rollouter, prompt, request, self._rules, number=number)
        episode.go_on(session)
        opened = await _opened(session, episode)
        self._known[opened.name] = session, episode
        episode_loop().begin(partial(self._forget, opened.name, session))
        return {"id": opened.name, "base_url": opened.base_url, "api_key": opened.api_key}

    async def _forget(self, name: str, session: ServedSession) -> None:
        await session.has_ended.wait()
        _, episode = self._known[name]
        self._rules.observations.forget([episode.number])
        await asyncio.sleep(self._time_limit)
        del self._known[name]

    async def _end(self, request: web.Request) -> dict[str, Any]:
        name = request.match_info["name"]
        if (known := self._known.get(name)) is None:
            message = f"There is no session {name!r}, or it ended long ago."
            raise RefusedError(404, message, code="session_not_found")
        session, episode = known
        session.is_to_end.set()
        await session.has_ended.wait()
        metrics = {} if episode.episode is None else dict(episode.episode.metrics)
        return {
            "id": name,
            "trajectories": [self._written(each) for each in episode.trajectories],
            "metrics": metrics,
            "drifts": {}
            if episode.episode is None
            else episode.episode.info.get("gateway/drifts", {}),
            "failures": [failure.message for failure in episode.failures],
        }

    def _written(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return a trajectory as in checkpoints, with the text of each given and sampled stretch."""
        tokens = zip(trajectory.sampled, trajectory.token_ids, strict=True)
        turns = [
            {"sampled": is_sampled, "text": self._rules.decode([token for _, token in stretch])}
            for is_sampled, stretch in groupby(tokens, key=lambda token: token[0])
        ]
        return {**trajectories.write(trajectory), "turns": turns}


async def _opened(session: ServedSession, episode: OpenEpisode) -> OpenSession:
    """Return the session once it is open. Raises RefusedError if its episode failed before."""
    ended = asyncio.create_task(session.has_ended.wait())
    try:
        either: list[asyncio.Future[Any]] = [session.opened, ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
    if session.opened.done():
        return session.opened.result()
    why = episode.error or "; ".join(failure.message for failure in episode.failures)
    raise RefusedError(500, f"The session could not be opened: {why}", code="server_error")
