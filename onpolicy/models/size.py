"""The sizes of a model: its memory, counted without building it, and the shapes of its operators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn
from transformers import PretrainedConfig

from onpolicy.contract import (
    AdapterShape,
    AttentionShape,
    DeltaShape,
    NumericsContract,
    OperatorShapes,
)
from onpolicy.errors import ConfigError
from onpolicy.models.delta_net import delta_nets, delta_shape, recurrent_layers
from onpolicy.models.empty import decoder_layers, empty_causal_lm
from onpolicy.models.expert_layers import experts_shapes, router_shapes
from onpolicy.models.facts import ModelFacts
from onpolicy.models.lora.adapters import adapter_size
from onpolicy.models.tensor_parallel import row_parallel_linears
from onpolicy.models.vision.tower import empty_tower
from onpolicy.ops.recurrence import state_shapes


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a model, all in elements."""

    parameters: int
    trained: int
    """Number of trained parameters; the others have neither gradients nor optimizer state."""

    layers: int
    largest_layer: int
    """Number of parameters of the largest decoder layer."""

    largest_parameter: int
    width: int
    """Number of inputs and outputs of all linears of a decoder layer, for one token, and of what a gated
    delta network computes from them."""

    hidden: int
    vocab: int

    adapters: int = 0
    """Number of parameters that belong to adapters."""

    recurrent: int = 0
    """Number of float32 numbers per token in the backward pass of the largest gated delta network."""

    @staticmethod
    def of(
        config: PretrainedConfig,
        trust_remote_code: bool = False,
        adapter: AdapterShape | None = None,
        tower_of: str | None = None,
    ) -> ModelSize:
        """Count on the meta device; with adapters, only these are trained. tower_of: a checkpoint whose
        vision tower is counted, too."""
        model = empty_causal_lm(config, trust_remote_code)
        model.tie_weights()
        layers = decoder_layers(model)
        parameters = list(model.parameters())
        tower = list(empty_tower(tower_of).parameters()) if tower_of else []
        added = adapter_size(model, adapter) if adapter else 0
        trained = sum(p.numel() for p in (*trainable_parameters(model), *tower))
        return ModelSize(
            parameters=sum(p.numel() for p in (*parameters, *tower)) + added,
            trained=added if adapter else trained,
            layers=len(layers),
            largest_layer=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
            largest_parameter=max(p.numel() for p in parameters),
            width=max(_width(layer, config) for layer in layers),
            hidden=config.hidden_size,
            vocab=config.vocab_size,
            adapters=added,
            recurrent=max((_recurrent(delta_shape(net)) for net in delta_nets(model)), default=0),
        )

    @property
    def whole(self) -> ModelSize:
        """Return the base model with all parameters trained; the model itself if it has no adapters."""
        base = self.parameters - self.adapters
        return replace(self, parameters=base, trained=base, adapters=0) if self.adapters else self

    @property
    def is_trained_whole(self) -> bool:
        """Return whether layers and head are trained, and not only adapters."""
        return 2 * self.trained > self.parameters

    @property
    def outside_layers(self) -> int:
        """Return the parameters of embedding, head and last norm, as if all layers had equal size."""
        return max(self.parameters - self.layers * self.largest_layer, 2 * self.vocab)


OWN_ROWS = 20
"""Vectors of a head's size that the backward pass of the gated delta rule holds per token and head: with
16 key heads and 32 value heads of 128 on a CPU it took 390 KB per token."""


def _recurrent(net: DeltaShape) -> int:
    states = net.key_dim * net.value_dim // net.chunk
    rows = OWN_ROWS * max(net.key_dim, net.value_dim) + 3 * net.chunk
    return net.value_heads * (states + rows)


def _width(layer: nn.Module, config: PretrainedConfig) -> int:
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    linears = [m.weight for m in layer.modules() if isinstance(m, nn.Linear)]
    experts = [p for p in layer.parameters() if p.dim() == 3]
    shapes = [delta_shape(net) for net in delta_nets(layer)]
    convolved = sum(3 * x.channels + 8 * x.value_heads * x.value_dim for x in shapes)
    linear = sum(sum(w.shape) for w in linears)
    return linear + convolved + chosen * sum(sum(p.shape[1:]) for p in experts)


def token_bytes(hf_config: PretrainedConfig, contract: NumericsContract) -> int:
    """Return the bytes of a token's keys and values in all layers that attend."""
    itemsize, kinds = getattr(torch, contract.dtype).itemsize, contract.shapes.attention
    numbers = max(kind.kv_heads * (kind.head_dim + kind.value_dim) for kind in kinds)
    layers = hf_config.num_hidden_layers - len(recurrent_layers(hf_config))
    return int(layers * itemsize * numbers)


def state_bytes(hf_config: PretrainedConfig, contract: NumericsContract) -> int:
    """Return the bytes of a request's states in all recurrent layers."""
    numbers = [map(prod, state_shapes(shape)) for shape in contract.shapes.delta]
    itemsize = getattr(torch, contract.dtype).itemsize
    each = max((itemsize * conv + 4 * delta for conv, delta in numbers), default=0)
    return len(recurrent_layers(hf_config)) * each


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def operator_shapes(facts: ModelFacts, row_parallel_blocks: int = 1) -> OperatorShapes:
    """Return the sizes at which a model of this configuration calls the operators."""
    model = facts.model
    linears = {m for m in model.modules() if isinstance(m, nn.Linear)}
    shared = row_parallel_linears(model) if row_parallel_blocks > 1 else set()
    delta = tuple(dict.fromkeys(map(delta_shape, delta_nets(model))))
    return OperatorShapes(
        linear=tuple(sorted(_linear_shapes(linears - shared) | router_shapes(model))),
        attention=_attention_shapes(facts),
        norm=tuple(sorted({*facts.norm_sizes(centered=False), *(x.value_dim for x in delta)})),
        layer_norm=facts.norm_sizes(centered=True),
        vocab_size=facts.config.vocab_size,
        row_linear=tuple(sorted(_linear_shapes(shared))),
        experts=tuple(sorted(experts_shapes(model))),
        delta=delta,
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
