"""Scaling of input embeddings as in transformers.

Diverges in stock SGLang: it multiplies with the factor in float32, where transformers rounds it to
the dtype of the weights first. And it keeps the factor in no buffer, where trainers_model.py looks
for it.

Source: replace_vocab_embed_class, sglang/srt/models/transformers.py. Can go when it rounds there
too.
"""

from __future__ import annotations

from typing import Any

import torch

from onpolicy.models.align import scaled
from sglang_patches import registry

TARGET = "sglang.srt.models.transformers.TransformersBase.replace_vocab_embed_class"


def install() -> None:
    registry.hook(TARGET, _after_replacement, "after")


def _after_replacement(result: Any, model: Any, *_: Any, **__: Any) -> Any:
    embedding = model.model.get_input_embeddings()
    scale = getattr(embedding, "embed_scale", None)
    if scale is None:
        return result
    unscaled: Any = type(embedding).__mro__[1]

    class ScaledEmbedding(unscaled):
        def forward(self, input_: torch.Tensor) -> torch.Tensor:
            return scaled(super().forward(input_), self.embed_scale)

    embedding.__class__ = ScaledEmbedding
    del embedding.embed_scale
    embedding.register_buffer("embed_scale", scale, persistent=False)
    return result
