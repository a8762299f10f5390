"""Whether a model's activations are kept for the backward pass, or computed again there."""

from __future__ import annotations

from transformers import PretrainedConfig

from onpolicy.config.groups import TrainerConfig
from onpolicy.models.hf_config import has_experts


def recomputes_activations(config: TrainerConfig, hf_config: PretrainedConfig) -> bool:
    """As the flags say, by default for mixtures of experts alone. It changes no bit of a gradient."""
    of_experts = config.moe_activation_checkpointing and has_experts(hf_config)
    return config.activation_checkpointing or of_experts
