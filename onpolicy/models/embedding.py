"""Input embeddings that multiply by a number (Gemma's), recognised by what they compute."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onpolicy.ops.checks.probe import probe


def scaled(embedded: Tensor, scale: Tensor) -> Tensor:
    """What such a module makes of the rows it looked up: the factor is rounded to their dtype first."""
    return embedded * scale.to(embedded.dtype)


def is_known_embedding(module: Any) -> bool:
    """Whether the module looks rows up, and at most multiplies them with its `embed_scale`."""
    if type(module) is nn.Embedding:
        return True
    scale = getattr(module, "embed_scale", None)
    if not isinstance(module, nn.Embedding) or not isinstance(scale, Tensor):
        return False
    weight, ids = probe(5, 4, seed=1).bfloat16(), torch.tensor([[3, 1, 4]])
    scale = torch.tensor(1.2345678)  # which bfloat16 rounds
    try:
        got = torch.func.functional_call(module, {"weight": weight, "embed_scale": scale}, (ids,))
    except Exception:  # whatever a module's own code does with a probe
        return False
    return torch.equal(got, scaled(F.embedding(ids, weight), scale))
