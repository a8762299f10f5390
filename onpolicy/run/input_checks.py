"""Rules between a run's inputs: its flags, its checkpoint and its prompts."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.weight_files import require_fit


def require_full_batch(config: TrainConfig, num_prompts: int) -> None:
    """Raise ConfigError if a rollout takes more prompts than the file has."""
    size = config.rollout.rollout_batch_size
    if size > num_prompts:
        raise ConfigError(
            f"--rollout-batch-size={size}: --prompt-data={config.data.prompt_data} has {num_prompts} "
            "prompts that differ, fewer than a rollout takes. Lower it (and raise "
            "--n-samples-per-prompt for as many samples), or give more prompts."
        )


def require_weights(config: TrainConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError if the policy's weights, or the reference's, are not of its own sizes."""
    model, reference = config.model, config.algorithm.ref_checkpoint
    require_fit(model.hf_checkpoint, hf_config, model.trust_remote_code)
    if not (config.algorithm.use_kl_loss and reference):
        return
    ref_config = load_config(reference, model.trust_remote_code, "--ref-checkpoint")
    if ref_config.vocab_size != hf_config.vocab_size:
        raise ConfigError(
            f"--ref-checkpoint={reference}: vocab_size={ref_config.vocab_size}, and the policy's is "
            f"{hf_config.vocab_size}. Choose a reference with the policy's tokenizer."
        )
    require_fit(reference, ref_config, model.trust_remote_code, "--ref-checkpoint")


def require_tokens(name: str, tokens: Any, config: PretrainedConfig) -> set[int]:
    """The tokens that `name`, a flag or a field of a file, gives: one, several, or None.

    Raises ConfigError for one that the model does not have.
    """
    given = list(tokens) if isinstance(tokens, (list, tuple)) else [tokens] * (tokens is not None)
    for token in given:
        if not isinstance(token, int) or not 0 <= token < config.vocab_size:
            raise ConfigError(
                f"{name}={token!r}: the model's tokens are 0 to {config.vocab_size - 1}. Correct it."
            )
    return set(given)
