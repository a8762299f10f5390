"""Attention with gradients: SGLang's forward pass, and a backward pass from its log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.hopper import flash_attention, flash_backward
from onpolicy.ops.hopper.pages import Pages
from onpolicy.ops.layouts import AttentionLayout, ScoreRule
from onpolicy.ops.triton.attention_backward import attention_backward


class HopperAttention(torch.autograd.Function):
    """See `Operators.attention`; the gradients need every key row to be used at most once."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: AttentionLayout,
        scores: ScoreRule,
    ) -> Tensor:
        out, lse = flash_attention.forward(q, k, v, Pages.of(layout), scores)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scores = layout, scores  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        layout, scores = ctx.layout, ctx.scores  # type: ignore[attr-defined]
        if scores.softcap:  # which PyTorch's backward pass does not know
            by_row = lse.t().contiguous()
            return (*attention_backward(grad, q, k, v, out, by_row, layout, scores), None, None)
        pages = Pages.of(layout)
        rows = pages.key_rows
        dq, dk, dv = flash_backward.backward(grad, (q, k[rows], v[rows]), out, lse, pages, scores)
        grad_k = torch.zeros_like(k).index_copy_(0, rows, dk)
        grad_v = torch.zeros_like(v).index_copy_(0, rows, dv)
        return dq, grad_k, grad_v, None, None
