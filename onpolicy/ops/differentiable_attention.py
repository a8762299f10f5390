"""Attention with gradients, from the forward and the backward pass of a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.layouts import AttentionLayout, ScoreRule

Gradients = tuple[Tensor, Tensor, Tensor]

Forward = Callable[[Tensor, Tensor, Tensor, AttentionLayout, ScoreRule], tuple[Tensor, Tensor]]
"""(q, k, v, layout, scores) -> out [T, H, D_v], and the log of the softmax's normaliser (lse):
float32 [T, H], or of any shape where there are no sinks."""

Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, AttentionLayout, ScoreRule], Gradients
]
"""(grad, q, k, v, out, lse, layout, scores) -> the gradients of q, k and v; it needs every key row used
at most once."""


def attend(
    forward: Forward,
    gradients: Backward,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    scores: ScoreRule,
) -> Tensor:
    """Compute `Operators.attention` by a backend's two functions, with gradients if enabled."""
    if not torch.is_grad_enabled():
        return forward(q, k, v, layout, scores)[0]
    out: Tensor = _Attention.apply(forward, gradients, q, k, v, scores.sinks, layout, scores)
    return out


class _Attention(torch.autograd.Function):
    """Attention with a backward pass.

    Where sequences share keys, `gradients` gets copies of them, sequence after sequence, and the
    copies' gradients are added up in that order.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        attended: Forward,
        gradients: Backward,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layout: AttentionLayout,
        scores: ScoreRule,
    ) -> Tensor:
        out, lse = attended(q, k, v, layout, scores)
        ctx.save_for_backward(q, k, v, sinks, out, lse)  # type: ignore[arg-type]
        ctx.how = gradients, layout, replace(scores, sinks=None)  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        gradients, layout, scores = ctx.how  # type: ignore[attr-defined]
        if (shared := layout.shared_keys) is None:
            grads = gradients(grad, q, k, v, out, lse, layout, scores)
        else:
            stores = k[shared.rows], v[shared.rows]
            of_q, *copies = gradients(grad, q, *stores, out, lse, _apart(layout), scores)
            grads = of_q, *(shared.add_up(of_copies, len(k)) for of_copies in copies)
        return None, None, *grads, _sink_gradient(sinks, grad, out, lse), None, None


def _apart(layout: AttentionLayout) -> AttentionLayout:
    """Return the layout over copies of its keys, for all layers of a model."""
    if _apart not in layout.plans:
        packed = AttentionLayout.packed(layout.key_lens, layout.key_rows.device)
        layout.plans[_apart] = replace(packed, query_lens=layout.query_lens)
    found: AttentionLayout = layout.plans[_apart]
    return found


def _sink_gradient(sinks: Tensor | None, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor | None:
    """Return the sinks' gradient, -sum over rows of exp(sink - lse) * (grad . out).

    It is a softmax's gradient for a value of 0. sinks: [H]; grad, out: [T, H, D_v]; lse: float32
    [T, H], including the sinks -> [H], or None for None.
    """
    if sinks is None:
        return None
    delta = (grad.float() * out.float()).sum(-1)
    return -(torch.exp(sinks.float() - lse) * delta).sum(0).to(sinks.dtype)
