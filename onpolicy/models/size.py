"""The sizes of a model that determine its memory, counted without building it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PretrainedConfig

from onpolicy.contract import AdapterShape, NumericsContract
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.layers import decoder_layers
from onpolicy.models.lora.adapters import adapter_size, merging_size
from onpolicy.models.trainable import trainable_parameters


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
    """Number of inputs and outputs of all linears of a decoder layer, for one token."""

    hidden: int
    vocab: int

    adapters: int = 0
    """Number of parameters that belong to adapters."""

    merging: int = 0
    """Number of float32 elements held while adapters are merged."""

    @staticmethod
    def of(
        config: PretrainedConfig,
        trust_remote_code: bool = False,
        adapter: AdapterShape | None = None,
    ) -> ModelSize:
        """Count on the meta device; with adapters, only these are trained."""
        model = empty_causal_lm(config, trust_remote_code)
        model.tie_weights()
        layers = decoder_layers(model)
        parameters = list(model.parameters())
        added = adapter_size(model, adapter) if adapter else 0
        trained = sum(p.numel() for p in trainable_parameters(model))
        return ModelSize(
            parameters=sum(p.numel() for p in parameters) + added,
            trained=added if adapter else trained,
            layers=len(layers),
            largest_layer=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
            largest_parameter=max(p.numel() for p in parameters),
            width=max(_width(layer, config) for layer in layers),
            hidden=config.hidden_size,
            vocab=config.vocab_size,
            adapters=added,
            merging=merging_size(model, adapter) if adapter else 0,
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


def token_bytes(hf_config: PretrainedConfig, contract: NumericsContract) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    itemsize, kinds = getattr(torch, contract.dtype).itemsize, contract.shapes.attention
    numbers = max(kind.kv_heads * (kind.head_dim + kind.value_dim) for kind in kinds)
    return int(hf_config.num_hidden_layers * itemsize * numbers)


def _width(layer: nn.Module, config: PretrainedConfig) -> int:
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    linears = [m.weight for m in layer.modules() if isinstance(m, nn.Linear)]
    experts = [p for p in layer.parameters() if p.dim() == 3]
    return sum(sum(w.shape) for w in linears) + chosen * sum(sum(p.shape[1:]) for p in experts)
