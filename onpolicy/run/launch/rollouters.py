"""Who rolls a run's prompts out, by its flags."""

from __future__ import annotations

from onpolicy.agents.function import FLAG, FunctionRollouter, load_agent
from onpolicy.config import TrainConfig
from onpolicy.rollout.episodes import Rollouter, SingleTurn


def make_rollouter(config: TrainConfig) -> Rollouter:
    """Raises ConfigError for a function that cannot be used."""
    if path := config.agent.custom_generate_function_path:
        return FunctionRollouter(load_agent(path, FLAG, {}))
    return SingleTurn()
