"""Who rolls a run's prompts out, by its flags."""

from __future__ import annotations

from functools import partial

from onpolicy.agents.function import FLAG, FunctionRollouter, load_agent
from onpolicy.agents.gateway import launch
from onpolicy.agents.gateway.rollouter import AgentRollouter, in_thread
from onpolicy.agents.gateway.server import Gateway
from onpolicy.config import TrainConfig
from onpolicy.models.hf_config import load_config
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.rollout.episodes import Rollouter, SingleTurn
from onpolicy.run.launch.stop_tokens import stop_token_ids


def make_rollouter(config: TrainConfig) -> Rollouter:
    """Raises ConfigError for a function that cannot be used."""
    if path := config.agent.custom_generate_function_path:
        return FunctionRollouter(load_agent(path, FLAG, {}))
    if path := config.agent.custom_agent_function_path:
        launch.require_parsers(config.agent)
        return AgentRollouter(partial(_gateway, config), in_thread(launch.load_agent(path)))
    return SingleTurn()


def _gateway(config: TrainConfig) -> Gateway:
    path, trust = config.model.hf_checkpoint, config.model.trust_remote_code
    stops = stop_token_ids(path, load_config(path, trust), config.rollout.rollout_stop_token_ids)
    return launch.make_gateway(config.agent, load_tokenizer(path, trust), stops)
