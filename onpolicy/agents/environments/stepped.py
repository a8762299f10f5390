"""Episodes in an environment that is a class with `reset` and `step`.

    class Guess:
        stop = ("\n",)  # where an action ends, besides the stop tokens

        def reset(self, prompt):
            return "Guess a number.\n"

        def step(self, action):
            return "Too low.\n", 0.0, False

The policy reads the observations of `reset` and `step`, and samples actions. An object belongs to
one episode. Its observations are journalled before use: an episode that is resumed or repeated
reads them from there, and the environment catches up when the journal ends.

`OpenEnv` is such a class, for an OpenEnv server, which runs anywhere, with or without a container.
The server's package need not be installed here: the class uses its WebSocket, one connection per
episode (openenv 0.10, its module env_server.http_server).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import aiohttp

from onpolicy.errors import AgentError
from onpolicy.rollout.rollouter import ContextExceededError, Episode, Turns
from onpolicy.system.proxies import proxy_of
from onpolicy.system.user_functions import load_function
from onpolicy.trajectory import Completion
from onpolicy.types import Prompt

Observation = str | Sequence[int] | Sequence[Mapping[str, Any]] | None
"""Text, token ids or chat messages, which `Turns.append` takes; None or empty: nothing to read."""

Rewards = Literal["episode", "turn", "token"]
"""The meaning of a reward from `step`: a summand of the episode's reward, the reward of the
action's last token, or a number for each of the action's tokens."""


class Environment(Protocol):
    """The interface of a class for `--environment module:Class`. All methods may be `async`; those
    that are not run in threads. `stop`, texts that end an action, and `close` may be left out."""

    def reset(self, prompt: Prompt) -> Observation:
        """Return the observation after the prompt."""

    def step(self, action: str) -> tuple[Observation, Any, bool]:
        """Return the observation after an action, a reward, and whether the episode ends.

        action: the sampled text, without the stop token. It may have been cut short, where no more
        tokens may be sampled; the episode ends then, whatever is returned.
        """

    def close(self) -> None:
        """Clean up after the episode, however it ended."""


async def roll_out(
    turns: Turns,
    prompt: Prompt,
    *,
    environment: str,
    arguments: Mapping[str, Any],
    rewards: Rewards = "episode",
) -> Episode:
    """Return an episode in the environment at a path. Raises AgentError for invalid values."""
    made = load_function(environment, "--environment")
    return await play(turns, prompt, lambda: made(**arguments), rewards, getattr(made, "stop", ()))


async def play(
    turns: Turns,
    prompt: Prompt,
    make: Callable[[], Environment],
    rewards: Rewards = "episode",
    stop: Sequence[str] = (),
) -> Episode:
    """Return an episode in the environment that `make` makes."""
    attempt = _Attempt(make, prompt)
    given: list[Any] = []
    answers: list[Completion] = []
    try:
        _append(turns, await turns.observe(attempt.reset))
        why = "length"
        while turns.num_left:
            answers.append(await turns.sample(stop=stop))
            attempt.actions.append(answers[-1].text)
            observation, reward, is_done = await turns.observe(attempt.step)
            given.append(_checked(reward, rewards, answers[-1]))
            if is_done:
                why = "done"
                break
            _append(turns, observation)
    except ContextExceededError:
        if not answers:
            raise
        why = "context"
    finally:
        await attempt.close()
    return _episode(given, answers, rewards, why)


def _append(turns: Turns, observation: Observation) -> None:
    if observation:
        turns.append(observation)


class _Attempt:
    """The environment of an episode, made when it is needed for a value that no journal holds."""

    def __init__(self, make: Callable[[], Environment], prompt: Prompt):
        self._make, self._prompt = make, prompt
        self._environment: Environment | None = None
        self.actions: list[str] = []
        """The actions so far; the environment has taken all but the last."""

    async def reset(self) -> Observation:
        self._environment = await _call(self._make)
        observation: Observation = await _call(self._environment.reset, self._prompt)
        return observation

    async def step(self) -> tuple[Observation, Any, bool]:
        *earlier, action = self.actions
        if self._environment is None:
            await self.reset()
            for each in earlier:
                await self._stepped(each)
        return await self._stepped(action)

    async def _stepped(self, action: str) -> tuple[Observation, Any, bool]:
        assert self._environment is not None
        found = await _call(self._environment.step, action)
        if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[2], bool)):
            raise AgentError(
                f"got {found!r:.80} from {type(self._environment).__name__}.step: it must be the tuple "
                "(observation, reward, done), done True or False",
                reason="result",
            )
        return found

    async def close(self) -> None:
        if close := getattr(self._environment, "close", None):
            await _call(close)


async def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's result; one that is not async runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    return await asyncio.to_thread(function, *arguments)


def _checked(reward: Any, rewards: Rewards, answer: Completion) -> Any:
    """Return the reward of a step. Raises AgentError if it has another shape."""
    each = [reward] if rewards != "token" else reward
    length = len(answer.token_ids) if rewards == "token" else 1
    fits = isinstance(each, Sequence) and len(each) == length
    if not fits or not all(isinstance(r, int | float) and not isinstance(r, bool) for r in each):
        shape = "a number" if rewards != "token" else f"{length} numbers, as many as tokens"
        raise AgentError(
            f"got reward={reward!r:.80} from a step: it must be {shape} with --environment-rewards "
            f"{rewards}",
            reason="result",
        )
    return reward


def _episode(
    given: Sequence[Any], answers: Sequence[Completion], rewards: Rewards, why: str
) -> Episode:
    info = {"ended": why}
    if rewards == "episode":
        return Episode(reward=math.fsum(given), info=info)
    if rewards == "turn":
        given = [
            [0.0] * (len(answer.token_ids) - 1) + [reward]
            for reward, answer in zip(given, answers, strict=True)
        ]
    by_token = [number for each in given for number in each]
    return Episode(token_rewards=[by_token], info=info)


MOST_BYTES = 100 << 20
"""The most bytes of a message, as in OpenEnv's own client."""


class OpenEnv:
    """An episode at the server at `url`.

    An action becomes the field `action` of the server's action, beside the fields in `fixed`. The
    policy reads the field `observation` of an observation, or the whole as JSON if none is named.
    `reset`: the arguments of the server's reset.
    """

    def __init__(
        self,
        url: str,
        action: str,
        observation: str = "",
        fixed: Mapping[str, Any] | None = None,
        reset: Mapping[str, Any] | None = None,
    ):
        self._url = url.rstrip("/") + "/ws"
        self._action, self._observation = action, observation
        self._fixed, self._reset = fixed or {}, reset or {}

    async def reset(self, prompt: Prompt) -> str:
        self._client = aiohttp.ClientSession()
        self._socket = await self._client.ws_connect(
            self._url, max_msg_size=MOST_BYTES, proxy=proxy_of(self._url, "--environment")
        )
        return self._text((await self._ask("reset", self._reset))["observation"])

    async def step(self, action: str) -> tuple[str, float, bool]:
        found, reward, is_done = await self.act(**{**self._fixed, self._action: action})
        return self._text(found), reward, is_done

    async def act(self, **action: Any) -> tuple[dict[str, Any], float, bool]:
        """Return the observation after an action with these fields, the reward, and `done`."""
        found = await self._ask("step", action)
        return found["observation"], float(found["reward"] or 0.0), bool(found["done"])

    async def close(self) -> None:
        if client := getattr(self, "_client", None):
            if socket := getattr(self, "_socket", None):
                await socket.close()
            await client.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer. Raises RuntimeError if there is none."""
        await self._socket.send_json({"type": kind, "data": {**data}})
        message = await self._socket.receive()
        if message.type != aiohttp.WSMsgType.TEXT:
            raise RuntimeError(f"{self._url}: {kind}: the server ended the connection")
        answer = message.json()
        found: dict[str, Any] = answer.get("data", {})
        if answer.get("type") == "error":
            raise RuntimeError(f"{self._url}: {kind} {dict(data)!r} is refused: {found}")
        return {"observation": {}, "reward": None, "done": False, **found}

    def _text(self, observation: Mapping[str, Any]) -> str:
        if not self._observation:
            return json.dumps(observation)
        if self._observation not in observation:
            raise ValueError(
                f"observation={self._observation!r}: {self._url} observes "
                f"{', '.join(sorted(observation))}. Name one of them in --environment-args."
            )
        found = observation[self._observation]
        return found if isinstance(found, str) else json.dumps(found)
