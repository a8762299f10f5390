"""Choice of an environment by the flags of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator

from onpolicy.agents.agent_workers import AgentFunction
from onpolicy.agents.environments import verifiers
from onpolicy.config.groups.agent_flags import AgentConfig, is_of_verifiers
from onpolicy.rollout.data_files import Row
from onpolicy.system.user_functions import load_function

FLAG = "--environment"
_HERE = "onpolicy.agents.environments"


def environment_function(config: AgentConfig) -> AgentFunction:
    """Return the function that rolls out episodes in the environment. Raises ConfigError."""
    kind, _, name = config.environment.partition(":")
    if is_of_verifiers(config):
        verifiers.load(name, config.environment_args)
        given = {"name": name, "arguments": config.environment_args}
        return AgentFunction(path=f"{_HERE}.verifiers.roll_out", flag=FLAG, arguments=given)
    path, arguments = config.environment, json.loads(config.environment_args)
    if kind == "openenv":
        path, arguments = f"{_HERE}.stepped.OpenEnv", {"url": name, **arguments}
    elif ".py:" not in path:
        path = path.replace(":", ".")
    load_function(path, FLAG)
    stepped = {
        "environment": path, "arguments": arguments, "rewards": config.environment_rewards
    }  # fmt: skip
    return AgentFunction(path=f"{_HERE}.stepped.roll_out", flag=FLAG, arguments=stepped)


def environment_rows(config: AgentConfig) -> Iterator[Row]:
    """Yield the prompts of a verifiers environment, as rows of a prompt file."""
    rows = verifiers.rows(config.environment.partition(":")[2], config.environment_args)
    for number, row in enumerate(rows, 1):
        yield f"{FLAG}={config.environment}: row {number}", row
