"""The backward pass of attention: FlashAttention-2's, without atomic additions.

One kernel owns rows and sums over keys, another owns keys and sums over rows, both in ascending
order and in float32, so every gradient is the same in every run. Probabilities are recomputed from
the forward's log-sum-exp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.ops.differentiable_attention import Gradients
from onpolicy.ops.layouts import AttentionLayout, ScoreRule
from onpolicy.ops.triton.attention_tiles import (
    capped,
    dim_block,
    first_block,
    is_visible,
    key_rows,
    rows_of_tile,
    sequence_at,
    sequences,
    unit_stride,
)
from onpolicy.ops.triton.device import UNFUSED


@triton.jit
def _load(
    x: tl.tensor, rows: tl.tensor, is_row: tl.tensor,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    dims = tl.arange(0, BLOCK)
    return tl.load(
        x + rows[:, None] + dims[None, :], mask=is_row[:, None] & (dims < DIM)[None, :], other=0.0
    )


@triton.jit
def _store(
    x: tl.tensor, values: tl.tensor, rows: tl.tensor, is_row: tl.tensor,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    dims = tl.arange(0, BLOCK)
    tl.store(
        x + rows[:, None] * DIM + dims[None, :],
        values.to(x.dtype.element_ty),
        mask=is_row[:, None] & (dims < DIM)[None, :],
    )


@triton.jit
def _scores(
    queries: tl.tensor, key_tile: tl.tensor, scale: tl.tensor, SOFTCAP: tl.constexpr
) -> tl.tensor:
    """Compute the scores, times log2(e)."""
    scores = tl.dot(queries, tl.trans(key_tile), input_precision="ieee") * (
        scale * 1.4426950408889634
    )
    if SOFTCAP > 0.0:
        scores = capped(scores, SOFTCAP)
    return scores


@triton.jit
def _probabilities(scores: tl.tensor, visible: tl.tensor, lse: tl.tensor) -> tl.tensor:
    return tl.where(visible, tl.exp2(scores - lse[:, None] * 1.4426950408889634), 0.0)


@triton.jit
def _through_cap(grad_scores: tl.tensor, scores: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    if SOFTCAP > 0.0:
        ratio = scores * (1.0 / (SOFTCAP * 1.4426950408889634))
        grad_scores = grad_scores * (1.0 - ratio * ratio)
    return grad_scores


@triton.jit(do_not_specialize=["stride_table"])
def _query_grad_kernel(
    page_table: tl.tensor, key_lens: tl.tensor, query_starts: tl.tensor, stride_table: tl.tensor,
    q: tl.tensor, k: tl.tensor, v: tl.tensor, grad: tl.tensor, lse: tl.tensor, out: tl.tensor,
    delta: tl.tensor, grad_q: tl.tensor, scale: tl.float32,
    stride_qt: tl.tensor, stride_qh: tl.tensor, stride_kr: tl.tensor, stride_kh: tl.tensor,
    stride_vr: tl.tensor, stride_vh: tl.tensor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the queries' gradients, and `delta` = grad . out of every row for the other kernel."""
    sequence, kv_head = tl.program_id(2), tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first_query, query_len, key_len, table = sequence_at(
        sequence, page_table, key_lens, query_starts, stride_table
    )
    if tile * ROWS >= query_len * GROUP:
        return
    query_rows, heads, positions, is_row = rows_of_tile(
        tile, kv_head, first_query, query_len, key_len, GROUP, ROWS
    )
    out_rows = query_rows * HEADS + heads
    queries = _load(q, query_rows * stride_qt + heads * stride_qh, is_row, DIM, DIM_BLOCK)
    grads = _load(grad, out_rows * VALUE_DIM, is_row, VALUE_DIM, VALUE_BLOCK)
    outs = _load(out, out_rows * VALUE_DIM, is_row, VALUE_DIM, VALUE_BLOCK)
    row_lse = tl.load(lse + out_rows)
    row_delta = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    tl.store(delta + out_rows, row_delta, mask=is_row)
    total = tl.zeros((ROWS, DIM_BLOCK), dtype=tl.float32)
    end = tl.minimum(key_len, tl.max(positions, 0) + 1)
    for start in range(first_block(tl.min(positions, 0), KEYS, WINDOW), end, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < end
        rows = key_rows(table, keys, is_key, 1)
        key_tile = _load(k + kv_head * stride_kh, rows * stride_kr, is_key, DIM, DIM_BLOCK)
        value_tile = _load(
            v + kv_head * stride_vh, rows * stride_vr, is_key, VALUE_DIM, VALUE_BLOCK
        )
        scores = _scores(queries, key_tile, scale, SOFTCAP)
        weights = _probabilities(scores, is_visible(keys, positions, WINDOW), row_lse)
        grad_weights = tl.dot(grads, tl.trans(value_tile), input_precision="ieee")
        grad_scores = _through_cap(weights * (grad_weights - row_delta[:, None]), scores, SOFTCAP)
        total = tl.dot(grad_scores.to(k.dtype.element_ty), key_tile, total, input_precision="ieee")
    _store(grad_q, total * scale, out_rows, is_row, DIM, DIM_BLOCK)


@triton.jit(do_not_specialize=["stride_table"])
def _key_grad_kernel(
    page_table: tl.tensor, key_lens: tl.tensor, query_starts: tl.tensor, stride_table: tl.tensor,
    q: tl.tensor, k: tl.tensor, v: tl.tensor, grad: tl.tensor, lse: tl.tensor, delta: tl.tensor,
    grad_k: tl.tensor, grad_v: tl.tensor, scale: tl.float32,
    stride_qt: tl.tensor, stride_qh: tl.tensor, stride_kr: tl.tensor, stride_kh: tl.tensor,
    stride_vr: tl.tensor, stride_vh: tl.tensor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
) -> None:  # fmt: skip
    sequence, kv_head = tl.program_id(2), tl.program_id(1)
    first_key = tl.program_id(0) * KEYS
    first_query, query_len, key_len, table = sequence_at(
        sequence, page_table, key_lens, query_starts, stride_table
    )
    if first_key >= key_len:
        return
    keys = first_key + tl.arange(0, KEYS)
    is_key = keys < key_len
    rows = key_rows(table, keys, is_key, 1)
    key_tile = _load(k + kv_head * stride_kh, rows * stride_kr, is_key, DIM, DIM_BLOCK)
    value_tile = _load(v + kv_head * stride_vh, rows * stride_vr, is_key, VALUE_DIM, VALUE_BLOCK)
    key_total = tl.zeros((KEYS, DIM_BLOCK), dtype=tl.float32)
    value_total = tl.zeros((KEYS, VALUE_BLOCK), dtype=tl.float32)
    # The first query is at position key_len - query_len; rows before these keys do not see them.
    first_token = tl.maximum(first_key - (key_len - query_len), 0)
    end_token = query_len
    if WINDOW:
        last_seen_from = first_key + KEYS - 1 + WINDOW - 1 - (key_len - query_len)
        end_token = tl.minimum(tl.maximum(last_seen_from + 1, 0), query_len)
    for tile in range(first_token * GROUP // ROWS, tl.cdiv(end_token * GROUP, ROWS)):
        query_rows, heads, positions, is_row = rows_of_tile(
            tile, kv_head, first_query, query_len, key_len, GROUP, ROWS
        )
        out_rows = query_rows * HEADS + heads
        queries = _load(q, query_rows * stride_qt + heads * stride_qh, is_row, DIM, DIM_BLOCK)
        grads = _load(grad, out_rows * VALUE_DIM, is_row, VALUE_DIM, VALUE_BLOCK)
        row_lse, row_delta = tl.load(lse + out_rows), tl.load(delta + out_rows)
        scores = _scores(queries, key_tile, scale, SOFTCAP)
        visible = is_visible(keys, positions, WINDOW) & is_row[:, None]
        weights = _probabilities(scores, visible, row_lse)
        half = weights.to(v.dtype.element_ty)
        value_total = tl.dot(tl.trans(half), grads, value_total, input_precision="ieee")
        grad_weights = tl.dot(grads, tl.trans(value_tile), input_precision="ieee")
        grad_scores = _through_cap(weights * (grad_weights - row_delta[:, None]), scores, SOFTCAP)
        half = grad_scores.to(k.dtype.element_ty)
        key_total = tl.dot(tl.trans(half), queries, key_total, input_precision="ieee")
    kv_rows = rows * tl.num_programs(1) + kv_head
    _store(grad_k, key_total * scale, kv_rows, is_key, DIM, DIM_BLOCK)
    _store(grad_v, value_total, kv_rows, is_key, VALUE_DIM, VALUE_BLOCK)


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: AttentionLayout,
    scores: ScoreRule,
) -> Gradients:
    """Return the gradients of attention from its output and log-sum-exp, if no key row is used twice.

    grad, out: [T, H, D_v]; q: [T, H, D]; k: [rows, H_kv, D]; v: [rows, H_kv, D_v]; lse: float32 [T,
    H].
    Return the gradients of q, k, v.
    """
    q, k, v, grad = unit_stride(q), unit_stride(k), unit_stride(v), grad.contiguous()
    where, count = sequences(layout.by_pages()), len(layout.query_lens)
    (_, heads, dim), (_, kv_heads, value_dim) = q.shape, v.shape
    group, widest = heads // kv_heads, max(dim_block(dim), dim_block(value_dim))
    # No other computation has to match these sums, so tiles are as large as fit.
    pipelined = q.dtype != torch.float32 and widest <= 128
    size = 64 if pipelined else 32 if widest <= 128 else 16
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    delta, grad_q = torch.empty_like(lse), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_k, grad_v = (x.new_zeros(x.shape) for x in (k, v))
    options = {
        "HEADS": heads,
        "GROUP": group,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "ROWS": size,
        "KEYS": size,
        "DIM_BLOCK": dim_block(dim),
        "VALUE_BLOCK": dim_block(value_dim),
        "WINDOW": scores.window or 0,
        "SOFTCAP": scores.softcap or 0.0,
        "num_warps": 8 if pipelined or q.dtype == torch.float32 else 4,
        "num_stages": 2 if pipelined else 1,
        **UNFUSED,
    }
    scale = scores.scale
    row_tiles = (triton.cdiv(max(layout.query_lens) * group, size), kv_heads, count)
    _query_grad_kernel[row_tiles](
        *where, q, k, v, grad, lse, out, delta, grad_q, scale, *strides, **options
    )
    # At 128, two buffers of queries do not fit on compute capability 8.9. With tiles half as high
    # there is one buffer, into which Triton 3.6 and 3.8 copy while a product still reads it: on an
    # H100 gradients differed in every run. So nothing is loaded ahead.
    if widest == 128:
        options["num_stages"] = 1
    key_tiles = (triton.cdiv(max(layout.key_lens), size), kv_heads, count)
    _key_grad_kernel[key_tiles](
        *where, q, k, v, grad, lse, delta, grad_k, grad_v, scale, *strides, **options
    )
    return grad_q, grad_k, grad_v
