"""Megatron's GPTModel with our modules, which returns log-probabilities of tokens."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn
from transformers import PretrainedConfig

from onpolicy.contract import NumericsContract
from onpolicy.models.policy import (
    AnyScores,
    PackedTokens,
    ValueHead,
    Values,
    rows_asked,
    score_rows,
)
from onpolicy.models.rounded_inputs import round_inputs
from onpolicy.ops.base import Operators
from onpolicy.ops.log_probs import Head, VocabParallel
from onpolicy.training.megatron.collectives import share_rows
from onpolicy.training.megatron.config import AlignedConfig, make_config
from onpolicy.training.megatron.family import is_sparse
from onpolicy.training.megatron.megatron_adapters import add_adapters, factors_of
from onpolicy.training.megatron.megatron_batch import LocalTokens
from onpolicy.training.megatron.modules import (
    LINEARS,
    AlignedAttention,
    AlignedColumnLinear,
    AlignedMLP,
    AlignedNorm,
    JoinedHeadsNorm,
    last_linear,
)
from onpolicy.training.megatron.moe import AlignedMoeLayer, SparseLayer
from onpolicy.training.megatron.rank_layout import MegatronLayout


class PolicyGptModel(GPTModel):
    """One pipeline stage. The last one returns scores or values, the others hidden states."""

    config: AlignedConfig
    value_head: ValueHead | None
    """Value head of a critic, instead of the output projection; whole on every tensor-parallel rank."""

    def __init__(self, config: AlignedConfig, *, has_values: bool = False):
        hf_config = config.hf_config
        tp = config.tensor_model_parallel_size
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(config),
            vocab_size=hf_config.vocab_size + -hf_config.vocab_size % tp,
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings and not has_values,
            position_embedding_type="none",  # our attention rotates
        )
        self.rotary = config.rotary(hf_config)
        self.has_values, self.value_head = has_values, None
        if has_values and self.post_process:
            del self.output_layer
            self.value_head = ValueHead(hf_config.hidden_size, config.params_dtype)
        shared = [self.embedding.word_embeddings] if self.pre_process else []
        shared += [self.output_layer] if self.post_process and not has_values else []
        for module in shared:
            if module.weight is not None:
                set_tensor_model_parallel_attributes(module.weight, True, 0, 1)
        round_inputs(self, config.activation_format, LINEARS)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.value_head is None:
            return super().sharded_state_dict(*args, **kwargs)
        # GPTModel's own looks for the output projection, which a critic lacks.
        return MegatronModule.sharded_state_dict(self, *args, **kwargs)

    def localize(self, batch: PackedTokens) -> LocalTokens:
        """Return this rank's part of a micro-batch."""
        local = LocalTokens.of(batch, self.config, self.cp_group.rank())
        like = torch.empty(0, dtype=self.config.params_dtype, device=batch.tokens.device)
        local.angles = self.rotary(like, local.positions)
        if self.config.sequence_parallel and local.routed_experts is not None:
            shares = local.routed_experts.chunk(self.tp_group.size())
            local.routed_experts = shares[self.tp_group.rank()]
        return local

    def _postprocess(
        self, hidden_states: Tensor, *, packed_seq_params: LocalTokens, **_: Any
    ) -> Tensor | AnyScores | Values:
        if not self.post_process:
            return hidden_states
        if self.value_head is not None:
            return self._values(hidden_states, self.value_head, packed_seq_params)
        local, group = packed_seq_params, self.tp_group
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, True, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states, group)
        asked = local.asked
        scores = score_rows(rows_asked(hidden[:, 0], asked), self.head(), asked)
        if local.order is None:
            return scores
        return type(scores)._make(share_rows(x, self.cp_group)[local.order] for x in scores)

    def head(self) -> Head:
        """Return this rank's rows of the last stage's output projection."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        vocabulary = VocabParallel(self.config.hf_config.vocab_size, self.tp_group)
        adapter = factors_of(self.output_layer)
        return Head(self.config.operators, weight, None, vocabulary, adapter=adapter)

    def _values(self, hidden: Tensor, head: ValueHead, local: LocalTokens) -> Values:
        """Compute all values and their whole gradient, on every tensor-parallel rank."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, False, group=self.tp_group)
        values = head.values(self.config.operators, rows_asked(hidden[:, 0], local.asked))
        if local.order is not None:
            values = share_rows(values, self.cp_group)[local.order]
        return Values(values)


def block_spec(config: AlignedConfig) -> TransformerBlockSubmodules:
    """Return Megatron's layer specification with our modules, for this pipeline stage."""
    first = get_transformer_layer_offset(config)
    layers = range(first, first + get_num_layers_to_build(config))
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(config, layer) for layer in layers], layer_norm=AlignedNorm
    )


def _layer_spec(config: AlignedConfig, layer: int) -> ModuleSpec:
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=AlignedColumnLinear,
            core_attention=AlignedAttention,
            linear_proj=last_linear(config),
            q_layernorm=_head_norm(config, config.num_attention_heads),
            k_layernorm=_head_norm(config, config.num_query_groups),
        ),
    )
    norm_before = IdentityOp if config.family.norms_after else AlignedNorm
    sparse = is_sparse(config.hf_config, layer)
    return ModuleSpec(
        module=SparseLayer if sparse else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm_before,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm_before,
            mlp=AlignedMoeLayer if sparse else AlignedMLP,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _head_norm(config: AlignedConfig, heads: int) -> Any:
    if not config.qk_layernorm:
        return None
    if config.family.qk_norm_joins_heads:
        return ModuleSpec(module=JoinedHeadsNorm, params={"heads": heads})
    return AlignedNorm


def build_model(
    hf_config: PretrainedConfig,
    contract: NumericsContract,
    operators: Operators,
    layout: MegatronLayout,
    device: torch.device | str = "cpu",
    *,
    has_values: bool = False,
) -> PolicyGptModel:
    """Build this rank's pipeline stage, with uninitialised weights.

    Call `initialize` (`make.py`) before, and `load_hf_weights` (`megatron_weights.py`) after it.
    """
    config = make_config(hf_config, contract, operators, layout)
    model = PolicyGptModel(config, has_values=has_values)
    add_adapters(model, config.adapter)
    model.to(device)
    return model


def packed_forward(model: nn.Module, batch: PackedTokens) -> Any:
    """Run the forward step of one micro-batch, for Megatron's schedules or alone.

    On the last pipeline stage it returns the output of a `PolicyModel`, or a critic's values, for the
    scored tokens, equal on every tensor- and context-parallel rank; on the other stages, hidden states
    to send. If every context-parallel rank computes the same loss, the sum of their gradients is the
    gradient of that loss. `model` may be wrapped, as by DistributedDataParallel.
    """
    local = get_attr_wrapped_model(model, "localize")(batch)
    result: Any = model(local.tokens, local.positions, None, packed_seq_params=local)
    return result
