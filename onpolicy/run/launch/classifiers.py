"""The servers of --reward-checkpoint that a command starts itself: what they are, hold, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onpolicy.cluster.hosts import Host
from onpolicy.cluster.placement import NOTHING, Placement, place_engines
from onpolicy.config import TrainConfig
from onpolicy.config.groups import EngineCountConfig, ModelConfig, OperatorsConfig, ServerConfig
from onpolicy.config.groups.remote_reward import starts_classifier
from onpolicy.config.rules import Facts
from onpolicy.config.tools import ServeConfig
from onpolicy.errors import ConfigError
from onpolicy.models.classifiers import as_decoder
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.rollout.engine_args import EngineSpec
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import serve_spec
from onpolicy.run.launch.memory_model import server_memory
from onpolicy.run.launch.process_memory import ProcessMemory

FLAG = "--reward-checkpoint"


def has_own_classifier(config: TrainConfig) -> bool:
    """Whether the command starts servers of the classifier."""
    return starts_classifier(Facts.of(config))


def classifier_spec(config: TrainConfig) -> EngineSpec:
    """What each of them is: what `onpolicy serve --hf-checkpoint` starts for the classifier.

    Raises ConfigError for one that aligned operators cannot compute.
    """
    reward, engine = config.reward, config.engine
    served = ServeConfig(
        model=ModelConfig(hf_checkpoint=reward.reward_checkpoint, dtype=config.model.dtype),
        operators=OperatorsConfig(operators=config.operators.operators),
        server=ServerConfig(cpu_threads=engine.cpu_threads),
        engines=EngineCountConfig(rollout_num_engines=reward.reward_num_engines),
        seed=config.seed,
    )
    hf_config = load_config(reward.reward_checkpoint, flag=FLAG)
    try:
        return serve_spec(
            served, hf_config, contract_for(served, as_decoder(hf_config), aligned=True)
        )
    except ConfigError as error:
        raise ConfigError(f"{FLAG}={reward.reward_checkpoint}: {error}") from error


def classifier_memory(config: TrainConfig, number: int = 0) -> list[ProcessMemory]:
    """What they hold, or so many of them; nothing if none is started."""
    if not has_own_classifier(config):
        return []
    hf_config = load_config(config.reward.reward_checkpoint, flag=FLAG)
    number, size = number or config.reward.reward_num_engines, ModelSize.of(hf_config, False)
    held = server_memory(classifier_spec(config), size, hf_config, number)
    return [replace(held, name=f"SGLang server of {FLAG}")]


def classifier_placement(
    config: TrainConfig, beside: Placement, hosts: Sequence[Host]
) -> Placement:
    """Where they are on `hosts`: by turns, where they share a host's cores, or on GPUs that nobody has
    `beside`.

    Raises ConfigError if there are too few GPUs.
    """
    number = config.reward.reward_num_engines
    others = beside if beside.device == "cuda" else NOTHING
    try:
        placed = place_engines(number, 1, beside.device, hosts, others)
    except ConfigError as error:
        raise ConfigError(
            f"--reward-num-engines={number}: each takes a GPU that nobody else has, and there are too "
            f"few ({error}) Start the classifier elsewhere with `onpolicy serve`, and give "
            "--reward-server-url."
        ) from error
    return Placement((), placed.engines[-number:])


def classifiers_described(
    config: TrainConfig, beside: Placement, hosts: Sequence[Host]
) -> list[str]:
    """Where they are, in words; nothing if none is started. Raises as `classifier_placement` does."""
    if not has_own_classifier(config):
        return []
    return classifier_placement(config, beside, hosts).describe("reward engine")
