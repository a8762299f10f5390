"""FlashAttention-3 with gradients, by the function that SGLang's `fa3` backend calls.

SGLang reads keys through a page table in prefill and in decode, so training does too, with pages of
one key. All three then run the same compiled kernels, whose sums over keys go in blocks of one
width per head size (`FLASH_HEAD_DIMS`). Contiguous keys would use kernels with other widths for
some head sizes and lengths; they would only save the gathering of keys by cp.async. With
`num_splits=1` a sequence is never cut into parts that are summed separately.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.errors import ContractError
from onpolicy.ops.hopper import flash_backward
from onpolicy.ops.layouts import (
    AttentionLayout,
    Gradients,
    PagedLayout,
    ScoreRule,
    attention_gradients,
)
from onpolicy.ops.triton.attention_backward import attention_backward


@cache
def loaded() -> ModuleType:
    """Load the module `sgl_kernel.flash_attn`, or raise ContractError."""
    try:
        from sgl_kernel import flash_attn
    except (ImportError, OSError, RuntimeError) as error:
        raise ContractError(
            f"sgl_kernel.flash_attn: cannot be loaded with torch {torch.__version__} ({error}). "
            "Install the version of sglang-kernel that the installed SGLang asks for (pip install "
            "-e '.[gpu]'), or choose --operators triton."
        ) from error
    module: ModuleType = flash_attn
    return module


def fits(q: Tensor, v: Tensor, scores: ScoreRule, sinks: Tensor | None) -> bool:
    """Return whether its kernels give this layer the same bits in every batch; q: [T, H, D].

    With a window, the widest heads get blocks of 64 keys, and of 80 once the page table is no wider
    than the window (tile_size.h, flash_api.cpp). The scaling of sinks and heads of two sizes are
    untested.
    """
    return (
        sinks is None and v.shape[-1] == q.shape[-1] and not (scores.window and q.shape[-1] > 192)
    )


def int32_pages(layout: AttentionLayout) -> PagedLayout:
    """Return `layout.by_pages()` with int32 page numbers, cached for all layers of a model."""
    if int32_pages not in layout.plans:
        pages = layout.by_pages()
        table = pages.page_table.to(torch.int32)
        layout.plans[int32_pages] = replace(pages, page_table=table)
    found: PagedLayout = layout.plans[int32_pages]
    return found


def forward(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scores: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Compute causal attention: returns [T, H, D_v] and the log of the normaliser, float32 [H, T].

    q: [T, H, D]; k: [rows, H_kv, D]; v: [rows, H_kv, D_v]. bfloat16, no autograd.
    """
    pages = int32_pages(layout)
    out, lse, *_ = _attend(q, k[:, None], v[:, None], pages, scores, return_softmax_lse=True)
    return out, lse


def over_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PagedLayout,
    scores: ScoreRule,
    out: Tensor | None,
) -> Tensor:
    """Compute attention for the rollout engine, with the arguments of SGLang's backend.

    The shapes are as in `Operators.paged_attention`; `layout.schedule` may hold
    `scheduler_metadata` and `cu_seqlens_k_new`.
    """
    buffer = {} if out is None else {"out": out}
    result: Tensor = _attend(q, k, v, layout, scores, **buffer)
    return result


def _attend(
    q: Tensor, k: Tensor, v: Tensor, layout: PagedLayout, scores: ScoreRule, **more: Any
) -> Any:
    how: dict[str, Any] = {"softmax_scale": scores.scale, "causal": True}
    how |= {"window_size": (scores.window - 1, 0)} if scores.window else {}
    how |= {"softcap": scores.softcap} if scores.softcap else {}
    return loaded().flash_attn_with_kvcache(
        q=q,
        k_cache=k,
        v_cache=v,
        cache_seqlens=layout.key_lens,
        page_table=layout.page_table,
        cu_seqlens_q=layout.query_starts,
        max_seqlen_q=layout.max_query_len,
        num_splits=1,
        **how,
        **layout.schedule,
        **more,
    )


class HopperAttention(torch.autograd.Function):
    """Attention by FlashAttention-3 with gradients; see `Operators.attention`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: AttentionLayout,
        scores: ScoreRule,
    ) -> Tensor:
        out, lse = forward(q, k, v, layout, scores)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scores = layout, scores  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        layout, scores = ctx.layout, ctx.scores  # type: ignore[attr-defined]

        def gradients(k: Tensor, v: Tensor, layout: AttentionLayout) -> Gradients:
            if scores.softcap:  # PyTorch's backward pass has no soft cap
                by_row = lse.t().contiguous()
                return attention_backward(grad, q, k, v, out, by_row, layout, scores)
            rows = flash_backward.PackedKeys.of(layout).rows
            inputs = q, k[rows], v[rows]
            dq, dk, dv = flash_backward.backward(grad, inputs, out, lse, layout, scores)
            grad_k = torch.zeros_like(k).index_copy_(0, rows, dk)
            grad_v = torch.zeros_like(v).index_copy_(0, rows, dv)
            return dq, grad_k, grad_v

        return (*attention_gradients(gradients, k, v, layout), None, None)
