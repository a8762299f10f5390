"""The sizes at which a model calls the operators, for the contract and the self-check."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from onpolicy.contract import AttentionShape, OperatorShapes
from onpolicy.errors import ConfigError
from onpolicy.models.experts import experts_shapes, router_shapes
from onpolicy.models.facts import ModelFacts
from onpolicy.models.tensor_parallel import row_parallel_linears


def operator_shapes(facts: ModelFacts, row_parallel_blocks: int = 1) -> OperatorShapes:
    """Return the sizes at which a model of this configuration calls the operators."""
    model = facts.model
    linears = {m for m in model.modules() if isinstance(m, nn.Linear)}
    shared = row_parallel_linears(model) if row_parallel_blocks > 1 else set()
    return OperatorShapes(
        linear=tuple(sorted(_linear_shapes(linears - shared) | router_shapes(model))),
        attention=_attention_shapes(facts),
        norm=facts.norm_sizes(centered=False),
        layer_norm=facts.norm_sizes(centered=True),
        vocab_size=facts.config.vocab_size,
        row_linear=tuple(sorted(_linear_shapes(shared))),
        experts=tuple(sorted(experts_shapes(model))),
    )


def _attention_shapes(facts: ModelFacts) -> tuple[AttentionShape, ...]:
    """Return the distinct attention shapes.

    If the model's code cannot show them, which no aligned run allows, return the usual shape.
    """
    try:
        told = tuple(dict.fromkeys(facts.attention))
    except ConfigError:
        told = ()
    return told or (_usual_attention(facts.config),)


def head_dim(config: PretrainedConfig) -> int:
    """Return the head size of the usual attention."""
    told: int | None = getattr(config, "head_dim", None)
    return told or int(config.hidden_size // config.num_attention_heads)


def _usual_attention(config: PretrainedConfig) -> AttentionShape:
    heads, dim = config.num_attention_heads, head_dim(config)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return AttentionShape(heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=dim)


def _linear_shapes(linears: set[nn.Linear]) -> set[tuple[int, int, bool]]:
    return {(m.out_features, m.in_features, m.bias is not None) for m in linears}
