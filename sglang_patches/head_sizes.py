"""Sizes of queries, keys and values in SGLang, taken from the contract.

SGLang plans the cache by the architecture's name: for DeepSeek's one compressed vector a token,
which its own models read. transformers' code calls attention with whole keys and values, and its
backend in SGLang takes their size from the configuration's `head_dim`, there the rotated part of a
key alone. Here the cache and the layers get the sizes with which the model's own code calls
attention. Where layers differ (Gemma-4's), the cache has the largest, and each layer uses the first
numbers of the first heads.

Source: ModelConfig._derive_model_shapes, sglang/srt/configs/model_config.py; TransformersBase.
_create_attention_instances, sglang/srt/models/transformers.py. Can go when the backend asks the
model.
"""

from __future__ import annotations

from typing import Any

from onpolicy.contract import NumericsContract
from onpolicy.errors import ContractError
from sglang_patches import registry

CONFIG_TARGET = "sglang.srt.configs.model_config.ModelConfig._derive_model_shapes"
LAYERS_TARGET = "sglang.srt.models.transformers.TransformersBase._create_attention_instances"


def install(contract: NumericsContract) -> None:
    head_dim, value_dim = head_sizes(contract)

    def after_shapes(result: Any, config: Any) -> Any:
        from sglang.srt.configs.model_config import AttentionArch

        config.attention_arch = AttentionArch.MHA
        config.head_dim = config.swa_head_dim = head_dim
        config.v_head_dim = config.swa_v_head_dim = value_dim
        return result

    def after_layers(layers: Any, *_: Any, **__: Any) -> Any:
        for layer in layers.values():
            layer.head_dim = layer.qk_head_dim = head_dim
            layer.v_head_dim = value_dim
        return layers

    registry.hook(CONFIG_TARGET, after_shapes, "after")
    registry.hook(LAYERS_TARGET, after_layers, "after")


def head_sizes(contract: NumericsContract) -> tuple[int, int]:
    """Return the largest (numbers of a query or key, numbers of a value) of a head of the cache.

    Raises ContractError if layers differ where SGLang's own attention reads the cache.
    """
    kinds = contract.shapes.attention
    sizes = {(kind.head_dim, kind.value_dim) for kind in kinds}
    if len(sizes) > 1 and contract.device != "cpu":
        raise ContractError(
            f"(head_dim, value_dim)={sorted(sizes)}: SGLang's cache has heads of one size, and only the "
            "aligned attention on a CPU reads heads of several out of it. Choose a "
            "checkpoint whose layers are alike, or run without --true-on-policy-mode."
        )
    return max(kind.head_dim for kind in kinds), max(kind.value_dim for kind in kinds)
