"""transformers' usual rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply transformers' rotary embedding: [B, H, T, D], [B, T, D], [B, T, D] -> [B, H, T, D]."""
    return x * cos[:, None] + _rotate_half(x) * sin[:, None]


def _rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)
