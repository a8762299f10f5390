"""The rollouter that a run's flags select."""

from __future__ import annotations

from functools import partial

from onpolicy.agents.environments.launch import environment_function
from onpolicy.agents.environments.sessions import acts_by
from onpolicy.agents.function import FLAG, FunctionRollouter, load_agent
from onpolicy.agents.gateway import launch
from onpolicy.agents.gateway.rollouter import AgentRollouter, in_thread
from onpolicy.agents.gateway.server import Gateway
from onpolicy.agents.worker_link import AgentFunction
from onpolicy.agents.workers import WorkerRollouter, num_workers
from onpolicy.config import TrainConfig
from onpolicy.config.groups.agents import AgentConfig, is_of_verifiers, template_options
from onpolicy.models.hf_config import load_config
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.rollout.episodes import Rollouter, SingleTurn
from onpolicy.run.launch.stop_tokens import stop_tokens_of


def make_rollouter(config: TrainConfig) -> Rollouter:
    """Return the rollouter of a run. Raises ConfigError for a function that cannot be used."""
    if path := config.agent.custom_generate_function_path:
        return _calling(AgentFunction(path=path, flag=FLAG), config.agent)
    if path := config.agent.custom_agent_function_path:
        launch.require_parsers(config.agent)
        return AgentRollouter(partial(_gateway, config), in_thread(launch.load_agent(path)))
    if config.agent.environment:
        launch.require_parsers(config.agent)
        acting = _calling(environment_function(config.agent), config.agent)
        if is_of_verifiers(config.agent):
            return acts_by(acting, partial(_gateway, config))
        return acting
    return SingleTurn()


def _calling(own: AgentFunction, config: AgentConfig) -> Rollouter:
    """Return a rollouter that calls a function in workers, or, without any, in the run's process."""
    function = load_agent(own.path, own.flag, own.arguments)
    if workers := num_workers(config):
        return WorkerRollouter(own, workers, config.agent_hang_limit)
    return FunctionRollouter(function)


def _gateway(config: TrainConfig) -> Gateway:
    path, trust = config.model.hf_checkpoint, config.model.trust_remote_code
    tokenizer = load_tokenizer(path, trust)
    stops = stop_tokens_of(config, load_config(path, trust), tokenizer)
    options = template_options(config.data.chat_template_kwargs)
    return launch.make_gateway(config.agent, tokenizer, stops, options)
