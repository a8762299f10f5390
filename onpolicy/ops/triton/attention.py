"""Causal attention over a paged key/value store: one kernel for training, prefill and decoding.

Row invariance: a query row (one token of one head) visits its keys in blocks of a fixed size from
absolute position 0, with the online softmax of FlashAttention-2 (Dao, 2023) in float32, so the
order of its sums depends on its own position alone. A block after that position changes nothing: its
weights are exactly 0, the maximum stays, and what was summed is scaled by exactly 1.

A thread block computes 64 rows (32 in float32), query tokens x the query heads that share a key
head, so a single decoding token fills a tensor core tile as far as grouped-query attention allows.
There is one tile size for all lengths: with another, rows would be spread over threads in another
way. 64 is the least that Hopper's wgmma takes.

With a window the loop begins with the first block of which a row of the tile sees a key. A row that
sees none of a block before its own keeps sums of 0 and a maximum of -inf, as if there were no block.
A sink is where the maximum and the normaliser begin.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.layouts import AttentionLayout, Scores
from onpolicy.ops.sinks import sink_gradient
from onpolicy.ops.triton.attention_backward import attention_backward
from onpolicy.ops.triton.attention_tiles import (
    Sequences,
    capped,
    dim_block,
    first_block,
    is_visible,
    key_rows,
    row_positions,
    unit_stride,
)
from onpolicy.ops.triton.device import UNFUSED, capability

LOG2_E = math.log2(math.e)


@triton.jit(do_not_specialize=["stride_table"])
def _attention_kernel(
    page_table: tl.tensor,
    key_lens: tl.tensor,
    query_starts: tl.tensor,
    stride_table: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    sinks: tl.tensor,
    scale: tl.float32,
    stride_qt: tl.tensor,
    stride_qh: tl.tensor,
    stride_kr: tl.tensor,
    stride_kh: tl.tensor,
    stride_vr: tl.tensor,
    stride_vh: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    sequence, kv_head = tl.program_id(2), tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those with the most keys start first
    first_query = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - first_query
    key_len = tl.load(key_lens + sequence)
    if tile * ROWS >= query_len * GROUP:
        return
    tokens, group, positions, is_row = row_positions(tile, query_len, key_len, GROUP, ROWS)
    heads = kv_head * GROUP + group
    query_rows = (first_query + tokens).to(tl.int64)
    dims, value_dims = tl.arange(0, DIM_BLOCK), tl.arange(0, VALUE_BLOCK)
    queries = tl.load(
        q + (query_rows * stride_qt + heads * stride_qh)[:, None] + dims[None, :],
        mask=(dims < DIM)[None, :],
        other=0.0,
    )
    k += kv_head * stride_kh + dims[:, None]
    v += kv_head * stride_vh + value_dims[None, :]
    table = page_table + sequence.to(tl.int64) * stride_table
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    mixed = tl.zeros((ROWS, VALUE_BLOCK), dtype=tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634
        total += 1.0
    # One loop for whole and for masked blocks: the compiler would round two of them differently.
    end = key_len - query_len + tl.minimum((tile * ROWS + ROWS - 1) // GROUP, query_len - 1) + 1
    for start in range(first_block(tl.min(positions, 0), KEYS, WINDOW), end, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < end
        rows = key_rows(table, keys, is_key, PAGE_SIZE)
        key_tile = tl.load(
            k + (rows * stride_kr)[None, :],
            mask=(dims < DIM)[:, None] & is_key[None, :],
            other=0.0,
        )
        value_tile = tl.load(
            v + (rows * stride_vr)[:, None],
            mask=is_key[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        scores = tl.dot(queries, key_tile, input_precision="ieee") * scale
        if SOFTCAP > 0.0:
            scores = capped(scores, SOFTCAP)
        scores = tl.where(is_visible(keys, positions, WINDOW), scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        base = larger
        if WINDOW:
            base = tl.where(larger == float("-inf"), 0.0, larger)  # of a row that saw nothing yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weights.to(v.dtype.element_ty), value_tile, mixed, input_precision="ieee")
        largest = larger
    mixed = mixed / total[:, None]
    out_rows = query_rows * HEADS + heads
    tl.store(
        out + out_rows[:, None] * VALUE_DIM + value_dims[None, :],
        mixed.to(out.dtype.element_ty),
        mask=is_row[:, None] & (value_dims < VALUE_DIM)[None, :],
    )
    tl.store(lse + out_rows, (largest + tl.log2(total)) * 0.6931471805599453, mask=is_row)


def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    scores: Scores,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Row-invariant causal attention without autograd; see `Operators.attention`.

    Returns (out [T, H, D_v], lse float32 [T, H]), the log of the softmax's normaliser.
    """
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    (T, H, D), (_, kv_heads, value_dim) = q.shape, v.shape
    out, lse = q.new_empty(T, H, value_dim), q.new_empty(T, H, dtype=torch.float32)
    group = H // kv_heads
    rows = 64 if q.dtype != torch.float32 else 32
    wide = max(D, value_dim) > 128
    grid = (triton.cdiv(sequences.max_query_len * group, rows), kv_heads, len(sequences))
    if not T:
        return out, lse
    _attention_kernel[grid](
        *sequences.arguments(),
        q,
        k,
        v,
        out,
        lse,
        lse if sinks is None else sinks.contiguous(),
        scores.scale * LOG2_E,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        HEADS=H,
        GROUP=group,
        DIM=D,
        VALUE_DIM=value_dim,
        PAGE_SIZE=sequences.page_size,
        ROWS=rows,
        KEYS=rows,
        DIM_BLOCK=dim_block(D),
        VALUE_BLOCK=dim_block(value_dim),
        WINDOW=scores.window or 0,
        SOFTCAP=scores.softcap or 0.0,
        HAS_SINKS=sinks is not None,
        num_warps=8 if wide and q.dtype != torch.float32 else 4,
        num_stages=_stages(q, wide),
        **UNFUSED,
    )
    return out, lse


def _stages(q: Tensor, wide: bool) -> int:
    """Blocks of keys on their way at a time, as many as the smallest shared memory holds."""
    if q.dtype == torch.float32:
        return 1
    return 3 if not wide else 2 if capability(q) >= 90 else 1


class TritonAttention(torch.autograd.Function):
    """Attention of whole sequences, with gradients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        layout: AttentionLayout,
        scores: Scores,
    ) -> Tensor:
        out, lse = blockwise_attention(q, k, v, Sequences.of(layout), scores, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)  # type: ignore[arg-type]
        ctx.layout, ctx.scores = layout, scores  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        layout, scores = ctx.layout, ctx.scores  # type: ignore[attr-defined]
        grads = attention_backward(grad, q, k, v, out, lse, layout, scores)
        return (*grads, sink_gradient(sinks, grad, out, lse), None, None)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    scores: Scores,
    page_size: int,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention whose layout lies on the device, as a CUDA graph needs it; no autograd.

    The arguments mean what they mean to FlashAttention-3's `flash_attn_with_kvcache`:
    q: [T, H, D]; k_cache: [rows, H_kv, D] or [pages, page_size, H_kv, D], v_cache likewise with
    D_v; page_table: int32 [B, >= pages]; cache_seqlens: int32 [B], the queries' keys included;
    cu_seqlens_q: int32 [B + 1]; max_seqlen_q: upper bound on the queries of a sequence.
    Returns (out [T, H, D_v], lse float32 [T, H]).
    """
    page_table = unit_stride(page_table)
    sequences = Sequences(page_table, page_size, cache_seqlens, cu_seqlens_q, max_seqlen_q)
    stores = k_cache.flatten(0, -3), v_cache.flatten(0, -3)
    return blockwise_attention(q, *stores, sequences, scores, sinks)
