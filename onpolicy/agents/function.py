"""Episodes by a function of the user's: `async def function(turns, prompt) -> Episode`."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from onpolicy.agents.tools.observation import counting
from onpolicy.errors import AgentError, ConfigError
from onpolicy.rollout.rollouter import Episode, Rollouter, Turns
from onpolicy.system.user_functions import describe, load_function
from onpolicy.types import Prompt

FLAG = "--custom-generate-function-path"

Function = Callable[[Any, Prompt], Awaitable[Any]]


def load_agent(path: str, flag: str, arguments: Mapping[str, Any]) -> Function:
    """Return the function at `path` with its arguments. Raises ConfigError if it is unusable."""
    function = load_function(path, flag)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{flag}={path}: is not async. It must be `async def function(turns, prompt)`; see "
            "docs/agents.md."
        )
    made = partial(function, **arguments)
    try:
        inspect.signature(made).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{flag}={path}: {error}: it is called with two arguments, the turns and the prompt. Make "
            "it `async def function(turns, prompt)`."
        ) from error
    return made


async def run_function(function: Function, turns: Any, prompt: Prompt) -> Episode:
    """Return the episode of a function, with its tools' counts. Raises AgentError for any error."""
    with counting() as counts:
        try:
            found = await function(turns, prompt)
        except AgentError:
            raise
        except (Exception, SystemExit) as error:
            raise AgentError(f"raised {describe(error)}", reason="raised") from error
    episode = Episode.of(found)
    return replace(episode, metrics={**counts, **episode.metrics})


class FunctionRollouter(Rollouter):
    """A rollouter that calls the function in the run's own process, where it may block all."""

    def __init__(self, function: Function):
        self._function = function

    async def roll_out(self, prompt: Prompt, turns: Turns) -> Episode:
        return await run_function(self._function, turns, prompt)
