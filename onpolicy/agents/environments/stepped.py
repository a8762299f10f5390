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
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from onpolicy.errors import AgentError
from onpolicy.rollout.episodes import Answer, ContextExceededError, Episode, Turns
from onpolicy.system.user_functions import load_function
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
    """Return an episode in the environment at the path `environment`, made with `arguments`.

    Raises AgentError where the environment returns invalid values.
    """
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
    answers: list[Answer] = []
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


def _checked(reward: Any, rewards: Rewards, answer: Answer) -> Any:
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
    given: Sequence[Any], answers: Sequence[Answer], rewards: Rewards, why: str
) -> Episode:
    info = {"ended": why}
    if rewards == "episode":
        return Episode(reward=math.fsum(given), info=info)
    by_token = [
        number
        for reward, answer in zip(given, answers, strict=True)
        for number in (reward if rewards == "token" else _at_end(reward, len(answer.token_ids)))
    ]
    return Episode(token_rewards=[by_token], info=info)


def _at_end(reward: float, length: int) -> list[float]:
    return [0.0] * (length - 1) + [reward]
