"""An environment, by the flags of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from onpolicy.agents.environments import verifiers
from onpolicy.agents.environments.sessions import acts_by
from onpolicy.agents.function import FunctionRollouter, load_agent
from onpolicy.agents.gateway.rollouter import AgentRollouter
from onpolicy.agents.gateway.server import Gateway
from onpolicy.config.groups.agents import AgentConfig, is_of_verifiers
from onpolicy.rollout.episodes import Rollouter
from onpolicy.rollout.prompts import Row
from onpolicy.system.user_functions import load_function

FLAG = "--environment"
_HERE = "onpolicy.agents.environments"


def environment_rollouter(config: AgentConfig, make_gateway: Callable[[], Gateway]) -> Rollouter:
    """Acts in the environment of `config`, of verifiers through a gateway.

    Raises ConfigError for one that cannot be used.
    """
    kind, _, name = config.environment.partition(":")
    arguments = json.loads(config.environment_args)
    if is_of_verifiers(config):
        verifiers.load(name, config.environment_args)
        given = {"name": name, "arguments": config.environment_args}
        function = load_agent(f"{_HERE}.verifiers.roll_out", FLAG, given)
        return AgentRollouter(make_gateway, acts_by(FunctionRollouter(function)))
    path = (
        config.environment if ".py:" in config.environment else config.environment.replace(":", ".")
    )
    if kind == "openenv":
        path, arguments = f"{_HERE}.openenv.OpenEnv", {"url": name, **arguments}
    given = {"environment": path, "arguments": arguments, "rewards": config.environment_rewards}
    load_function(path, FLAG)
    return FunctionRollouter(load_agent(f"{_HERE}.stepped.roll_out", FLAG, given))


def environment_rows(config: AgentConfig) -> Iterator[Row]:
    """The prompts that an environment of verifiers has itself, as rows of a prompt file."""
    rows = verifiers.rows(config.environment.partition(":")[2], config.environment_args)
    for number, row in enumerate(rows, 1):
        yield f"{FLAG}={config.environment}: row {number}", row
