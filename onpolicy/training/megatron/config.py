"""Megatron's model configuration, from a Hugging Face configuration and a layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from onpolicy.contract import AdapterShape, NumericsContract
from onpolicy.models.expert_layers import expert_blocks, routers_of
from onpolicy.models.facts import ModelFacts
from onpolicy.ops.base import Operators
from onpolicy.training.megatron.family import (
    Family,
    expert_size,
    family_of,
    is_so,
    is_sparse,
    num_experts,
)
from onpolicy.training.megatron.rank_layout import MegatronLayout


@dataclass(kw_only=True)
class AlignedConfig(TransformerConfig):
    """Megatron's configuration, which reaches every module, with the fields that our modules need."""

    hf_config: PretrainedConfig

    family: Family
    """Features of the architecture."""

    rotary: type[nn.Module]
    """transformers' rotary embedding of this architecture, which computes the angles."""

    router: type[nn.Module] | None = None
    """transformers' router of this architecture, if the model has experts."""

    unread: tuple[str, ...]
    """Patterns of checkpoint names that transformers ignores, such as multi-token prediction."""

    operators: Operators
    """Operators of every module; they may be replaced between rollouts."""

    windows: tuple[int | None, ...]
    """Largest number of keys that a query of each layer attends to, or None."""

    row_parallel_blocks: int
    """Number of row-parallel blocks in the contract."""

    activation_format: str
    """Activation format in the contract."""

    adapter: AdapterShape | None
    """Adapter shape in the contract."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.activation = ACT2FN[self.hf_config.hidden_act]
        self.activation_func = self.activation.forward  # a module would go into checkpoints


@contextmanager
def replaced(holder: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a module or another object within this context."""
    own = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, own)


def make_config(
    hf_config: PretrainedConfig,
    contract: NumericsContract,
    operators: Operators,
    layout: MegatronLayout,
) -> AlignedConfig:
    """Make the configuration of a model whose layout `MegatronLayout.check` accepts."""
    dtype = getattr(torch, contract.dtype)
    family, facts = family_of(hf_config), ModelFacts(hf_config)
    rotary: Any = facts.model.base_model.rotary_emb
    return AlignedConfig(
        hf_config=hf_config,
        family=family,
        rotary=type(rotary),
        unread=tuple(facts.model._keys_to_ignore_on_load_unexpected or ()),
        operators=operators,
        windows=tuple(layer.window for layer in facts.attention),
        row_parallel_blocks=contract.row_parallel_blocks,
        activation_format=contract.activation_format,
        adapter=contract.adapter,
        moe_token_dispatcher_type="alltoall",
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=contract.shapes.attention[0].head_dim,
        ffn_hidden_size=hf_config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        qk_layernorm=is_so(hf_config, family.qk_norm),
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=is_so(hf_config, family.qkv_bias),
        hidden_dropout=0.0,  # the rollout has none
        attention_dropout=0.0,
        attention_backend=AttnBackend.local,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Allocate this rank's shards alone, on the host and uninitialised: weights are loaded.
        use_cpu_initialization=True,
        perform_initialization=False,
        deterministic_mode=True,
        calculate_per_token_loss=True,  # gradients are sums; see schedule.py
        variable_seq_lengths=layout.pipeline_model_parallel_size > 1,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        **_experts(hf_config, facts),
        **_recompute(layout),
    )


def _experts(hf_config: PretrainedConfig, facts: ModelFacts) -> dict[str, Any]:
    blocks = expert_blocks(facts.model)
    if not blocks:
        return {}
    layers = range(hf_config.num_hidden_layers)
    router: Any = routers_of(blocks[0])[0]
    return {
        "router": type(router),
        "num_moe_experts": num_experts(hf_config),
        "moe_ffn_hidden_size": expert_size(hf_config),
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_pre_softmax": True,
        "moe_layer_freq": [int(is_sparse(hf_config, layer)) for layer in layers],
    }


def _recompute(layout: MegatronLayout) -> dict[str, Any]:
    if not layout.recompute_activations:
        return {}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
