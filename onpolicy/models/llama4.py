"""Llama-4's decoder rewritten in the form of the other decoders, where it computes the same function.

transformers (5.12 to 5.19) writes three things differently. Every expert computes every token,
mostly on zeros; here a token's experts are called as in other mixtures. A token attends only to the
keys of its chunk, and queries are scaled by their position; up to `context_limit` tokens a sequence
is one chunk and that scale is 1, so both are dropped here, and no more tokens are served. And the
decoder's name prefix belongs to the model with images.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig
from transformers.integrations.moe import use_experts_implementation
from transformers.models.llama4.modeling_llama4 import (
    Llama4ForCausalLM,
    Llama4TextAttention,
    Llama4TextExperts,
    Llama4TextMoe,
)

from onpolicy.errors import ConfigError


@use_experts_implementation(is_transposed=True)
class ChosenExperts(Llama4TextExperts):
    """Llama-4's experts with the flags and arguments of transformers' other experts."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Raise NotImplementedError; the decorator replaces this with an expert function."""
        raise NotImplementedError


FLAGS = {
    "has_gate": True, "has_bias": False, "is_transposed": True, "is_concatenated": True,
    "_is_expert_parallel": False,
}  # fmt: skip
"""Flags that the decorator sets on new experts, to set on experts that were built without it."""


def use_usual_form(model: Any) -> None:
    """Rewrite Llama-4's layers in `model`, in place; leave any other model as it is."""
    for module in model.modules():
        if isinstance(module, Llama4TextMoe):
            module.experts.__class__ = ChosenExperts
            vars(module.experts).update(FLAGS, config=model.config)
            module.forward = MethodType(_route, module)  # type: ignore[method-assign]
        elif isinstance(module, Llama4TextAttention):
            module.attn_temperature_tuning = False
    if isinstance(model, Llama4ForCausalLM):
        model.base_model_prefix = "model"


def _route(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Compute [..., H] -> [T, H] and the router's logits [T, E]; scores scale the experts' inputs.

    Source: Llama4TextMoe.forward and Llama4Router.forward,
    transformers/models/llama4/modeling_llama4.py.
    """
    x = hidden_states.reshape(-1, block.hidden_dim)
    logits = F.linear(x, block.router.weight)
    values, chosen = torch.topk(logits, block.top_k, dim=1)
    scores = torch.sigmoid(values.float()).to(x.dtype)
    out: Tensor = block.shared_expert(x)
    for score, expert in zip(scores.split(1, dim=1), chosen.split(1, dim=1), strict=True):
        out = out + block.experts(x * score, expert, torch.ones_like(score))
    return out, logits


def is_llama4(config: PretrainedConfig) -> bool:
    """Return whether the configuration is Llama-4's language model."""
    return str(config.model_type) == "llama4_text"


def context_limit(config: PretrainedConfig) -> float:
    """Return the tokens up to which Llama-4 has neither chunks nor scaled queries, or infinity.

    It is infinity for every other model.
    """
    if not is_llama4(config):
        return float("inf")
    limit: float = config.attention_chunk_size or float("inf")
    return min(limit, config.floor_scale - 1) if config.attn_temperature_tuning else limit


def require_context(config: PretrainedConfig, context: int) -> None:
    """Raise ConfigError if an engine would serve more than `context_limit` tokens."""
    if context > (limit := context_limit(config)):
        raise ConfigError(
            f"--sglang-context-length={context}: beyond {limit:.0f} tokens this model attends in "
            f"chunks (attention_chunk_size={config.attention_chunk_size}) and scales its queries "
            f"(floor_scale={config.floor_scale}), for which there is no operator. Serve at most "
            f"{limit:.0f} tokens."
        )
