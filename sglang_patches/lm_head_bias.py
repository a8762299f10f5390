"""Gives the engine's output projection the bias that the model has (Phi, Phi-3.5-MoE).

Stock SGLang's transformers backend leaves it out, and its loader then finds no place for the weights.
Source: CausalMixin.__init__, sglang/srt/models/transformers.py. Can go when it asks the model.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from sglang_patches import registry
from sglang_patches.trainers_model import trainers_model

TARGET = "sglang.srt.models.transformers.CausalMixin.__init__"


def install() -> None:
    registry.hook(TARGET, _after_init, "after")


def _after_init(result: Any, model: Any, *_: Any, **__: Any) -> Any:
    from sglang.srt.utils import set_weight_attrs

    head, trainers = model.lm_head, trainers_model(model.config).get_output_embeddings()
    if head is not None and trainers.bias is not None:
        head.bias = nn.Parameter(head.weight.new_empty(head.weight.shape[0]))
        set_weight_attrs(head.bias, {"output_dim": 0, "weight_loader": head.weight_loader})
    return result
