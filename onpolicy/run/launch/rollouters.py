"""Who rolls a run's prompts out, by its flags."""

from __future__ import annotations

from onpolicy.agents.function import FLAG, FunctionRollouter, load_agent
from onpolicy.agents.worker_link import AgentFunction
from onpolicy.agents.workers import WorkerRollouter, default_workers
from onpolicy.config import TrainConfig
from onpolicy.rollout.episodes import Rollouter, SingleTurn


def make_rollouter(config: TrainConfig) -> Rollouter:
    """Raises ConfigError for a function that cannot be used."""
    if path := config.agent.custom_generate_function_path:
        function, workers = load_agent(path, FLAG, {}), config.agent.agent_workers
        if workers == 0:
            return FunctionRollouter(function)
        own = AgentFunction(path=path, flag=FLAG)
        return WorkerRollouter(own, workers or default_workers(), config.agent.agent_hang_limit)
    return SingleTurn()
