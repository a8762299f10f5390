"""Checks of a run's inputs against each other: flags, checkpoints, prompts and ranks."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from onpolicy.config import TrainConfig, groups
from onpolicy.errors import ConfigError
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import has_experts, load_config
from onpolicy.models.routing_replay import can_be_replayed
from onpolicy.models.weight_files import require_fit
from onpolicy.rollout.engine_args import CONTEXT_MARGIN
from onpolicy.run.launch.contracts import contract_for
from onpolicy.train.megatron import make as megatron


def check_layout(config: TrainConfig) -> None:
    """Raise ConfigError if the model cannot be laid out over the run's ranks; starts nothing."""
    if config.trainer.train_backend == "megatron":
        hf_config = load_config(config.model.hf_checkpoint, config.model.trust_remote_code)
        megatron.check(config, hf_config, contract_for(config, hf_config, aligned=False))


def require_experts(config: TrainConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError if expert choices are to be replayed and the model has none that can be."""
    if not config.fallback.use_rollout_routing_replay:
        return
    architecture = (hf_config.architectures or ["none"])[0]
    if not has_experts(hf_config):
        raise ConfigError(
            f"--use-rollout-routing-replay: architecture={architecture} has no experts to choose. "
            "Leave it out."
        )
    if not can_be_replayed(ModelFacts(hf_config, config.model.trust_remote_code)):
        raise ConfigError(
            f"--use-rollout-routing-replay: architecture={architecture} has routers that do not "
            "choose by top-k over all experts, which is what is replayed. Leave it out."
        )


def require_context(config: TrainConfig, hf_config: PretrainedConfig) -> int:
    """Return the number of tokens of the longest prompt that leaves room for the longest response.

    Raises ConfigError if that response alone does not fit the model's context.
    """
    lengths = {
        "--rollout-max-response-len": config.rollout.rollout_max_response_len,
        "--eval-max-response-len": config.eval.eval_max_response_len or 0,
    } | {
        f"--eval-config: {name}: max_response_len": each.max_response_len
        for name, each in config.eval_sets.items()
    }
    flag, longest = max(lengths.items(), key=lambda item: item[1])
    room: int = hf_config.max_position_embeddings - CONTEXT_MARGIN - longest
    if room <= 0:
        raise ConfigError(
            f"{flag}={longest}: with {CONTEXT_MARGIN} tokens that SGLang keeps free it "
            f"does not fit the model's context of {hf_config.max_position_embeddings}. Lower it."
        )
    asked = config.agent.rollout_max_context_len
    if asked is not None:
        if asked > room + longest:
            raise ConfigError(
                f"--rollout-max-context-len={asked}: does not fit the model's context of "
                f"{hf_config.max_position_embeddings}, of which SGLang keeps {CONTEXT_MARGIN} tokens "
                "free. Lower it."
            )
        room = asked - longest
    return room


def require_full_batch(config: TrainConfig, num_prompts: int) -> None:
    """Raise ConfigError if a rollout takes more prompts than the file has."""
    size = config.rollout.rollout_batch_size
    if size > num_prompts:
        raise ConfigError(
            f"--rollout-batch-size={size}: --prompt-data={config.data.sources} has {num_prompts} "
            "prompts that differ, fewer than a rollout takes. Lower it (and raise "
            "--n-samples-per-prompt for as many samples), or give more prompts."
        )


def require_weights(config: TrainConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError if a checkpoint's weights (policy, reference or critic) do not have its model's
    shapes, or if reference or critic cannot be computed or laid out as the policy is."""
    model = config.model
    require_fit(model.hf_checkpoint, hf_config, model.trust_remote_code)
    others = {
        "--ref-checkpoint": config.algorithm.ref_checkpoint * config.algorithm.reads_reference,
        "--critic-load": config.critic.critic_load,
    }
    plain = replace(config, lora=groups.LoraConfig())
    for flag, path in others.items():
        if not path:
            continue
        own = load_config(path, model.trust_remote_code, flag)
        if own.vocab_size != hf_config.vocab_size:
            raise ConfigError(
                f"{flag}={path}: vocab_size={own.vocab_size}, and the policy's is "
                f"{hf_config.vocab_size}. Choose a checkpoint with the policy's tokenizer."
            )
        of_critic = flag == "--critic-load"
        require_fit(path, own, model.trust_remote_code, flag, of_critic=of_critic)
        try:
            # Adapters are the policy's alone.
            contract = contract_for(plain, own, aligned=config.plan.may_align)
            if config.trainer.train_backend == "megatron":
                megatron.check(config, own, contract)
        except ConfigError as error:
            raise ConfigError(f"{flag}={path}: {error}") from error
