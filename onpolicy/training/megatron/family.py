"""A table of the features in which the architectures that Megatron's model supports differ.

Routers and rotary embeddings are not here: they are transformers' own (`config.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from onpolicy.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Features of an architecture that Llama lacks; a string names a field of the configuration."""

    qkv_bias: bool | str = False

    qk_norm: bool | str = False

    qk_norm_joins_heads: bool = False
    """Whether one norm covers all heads of a token, instead of each head."""

    norms_after: bool = False
    """Whether a layer's norms apply to the outputs of attention and MLP, instead of their inputs."""

    norm_rounds_last: bool = False
    """Whether the norm rounds last; see `Operators.rms_norm`."""

    rotated_layers: str | None = None
    """Field with a number for every layer, 0 where queries and keys are not rotated."""

    num_experts: str | None = None

    expert_size: str = "moe_intermediate_size"

    sparse_name: str = "mlp"
    """A checkpoint's name of the module with router and experts; transformers' is mlp."""

    expert_linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """A checkpoint's names of an expert's linears."""

    router_buffers: tuple[str, ...] = ()
    """Buffers of the router, float32 [experts], in the checkpoint and without gradient."""

    shared_expert: str | None = None
    """Name of the MLP that every token passes besides its experts."""

    shared_expert_is_gated: bool = False

    shared_expert_is_whole: bool = False
    """Whether the shared expert is not tensor-parallel, as in transformers' plan."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True),
    "MistralForCausalLM": Family(),
    "SmolLM3ForCausalLM": Family(rotated_layers="no_rope_layers"),
    "Olmo2ForCausalLM": Family(
        qk_norm=True, qk_norm_joins_heads=True, norms_after=True, norm_rounds_last=True
    ),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, num_experts="num_experts"),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias="qkv_bias",
        num_experts="num_experts",
        shared_expert="shared_expert",
        shared_expert_is_gated=True,
        shared_expert_is_whole=True,
    ),
    "MixtralForCausalLM": Family(
        num_experts="num_local_experts",
        expert_size="intermediate_size",
        sparse_name="block_sparse_moe",
        expert_linears=("w1", "w3", "w2"),
    ),
    "Glm4MoeForCausalLM": Family(
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        num_experts="n_routed_experts",
        router_buffers=("e_score_correction_bias",),
        shared_expert="shared_experts",
    ),
}
"""Families by the class name in transformers."""


def family_of(config: Any) -> Family:
    """Return the family of a Hugging Face configuration. Raises ConfigError for one that is not in the
    table."""
    architecture = (getattr(config, "architectures", None) or ["none"])[0]
    # A critic's checkpoint may be a token classifier, of the same family.
    architecture = architecture.replace("ForTokenClassification", "ForCausalLM")
    if architecture not in FAMILIES:
        raise ConfigError(
            f"architecture={architecture}: --train-backend megatron knows "
            f"{', '.join(FAMILIES)}. Use --train-backend fsdp for this model."
        )
    return FAMILIES[architecture]


def is_so(config: Any, fact: bool | str) -> bool:
    """Return whether a family's feature holds for the model of this configuration."""
    return bool(getattr(config, fact)) if isinstance(fact, str) else fact


def num_experts(config: Any) -> int:
    """Return the number of experts of a sparse layer; 0 if the model has none."""
    name = family_of(config).num_experts
    return getattr(config, name) if name else 0


def expert_size(config: Any) -> int:
    """Return the intermediate size of an expert."""
    return int(getattr(config, family_of(config).expert_size))


def shared_expert_size(config: Any) -> int:
    """Return the intermediate size of the shared expert; several shared experts count as one."""
    own = getattr(config, "shared_expert_intermediate_size", None)
    return own or expert_size(config) * int(config.n_shared_experts)


def is_sparse(config: Any, layer: int) -> bool:
    """Return whether layer `layer` (from 0) has experts instead of one MLP."""
    if not num_experts(config):
        return False
    is_dense = layer in (getattr(config, "mlp_only_layers", None) or ())
    is_dense |= layer < getattr(config, "first_k_dense_replace", 0)
    return not is_dense and (layer + 1) % getattr(config, "decoder_sparse_step", 1) == 0


def is_rotated(config: Any, layer: int) -> bool:
    """Return whether layer `layer` (from 0) rotates queries and keys."""
    name = family_of(config).rotated_layers
    return name is None or bool(getattr(config, name)[layer])


def divided_sizes(config: Any) -> Iterator[tuple[str, int]]:
    """Yield the sizes that tensor-parallel ranks divide equally, by the configuration's names."""
    family = family_of(config)
    yield "num_attention_heads", config.num_attention_heads
    yield "num_key_value_heads", config.num_key_value_heads
    if not all(is_sparse(config, layer) for layer in range(config.num_hidden_layers)):
        yield "intermediate_size", config.intermediate_size
    if num_experts(config):
        yield family.expert_size, expert_size(config)
