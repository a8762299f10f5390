"""The gradient of attention's sinks, for every backward pass."""

from __future__ import annotations

import torch
from torch import Tensor


def sink_gradient(sinks: Tensor | None, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor | None:
    """-sum over rows of exp(sink - lse) * (grad . out): a softmax's gradient for a value of 0.

    sinks: [H]; grad, out: [T, H, D_v]; lse: float32 [T, H], the sinks in it -> [H], or None for None.
    """
    if sinks is None:
        return None
    delta = (grad.float() * out.float()).sum(-1)
    return -(torch.exp(sinks.float() - lse) * delta).sum(0).to(sinks.dtype)
