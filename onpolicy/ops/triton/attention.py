"""Causal attention over a paged key/value store: one kernel for training, prefill and decode.

Row invariance: a query row (one token of one head) visits its keys in chunks of ATTENTION_CHUNK,
and each chunk in blocks of a fixed size, both from absolute position 0, with the online softmax of
FlashAttention-2 (Dao, 2023) in float32. So the order of its sums depends only on its own position.
Every chunk is summed by itself and then merged with the chunks before it (`attention_tiles.py`). A
block or a chunk after that position changes nothing: its weights are exactly 0, the maximum stays,
and the earlier sums are scaled by exactly 1. So one program or many can sum the chunks
(`attention_split.py`).

A thread block computes 64 rows (32 in float32), query tokens x the query heads that share a key
head, so a single decode token fills a tensor core tile as far as grouped-query attention allows.
There is one tile size for all lengths: another size would distribute rows over threads differently.
64 is the least that Hopper's wgmma takes.

With a window, the loop begins with the first block in which a row of the tile sees a key. A row
that sees nothing of a block or a chunk keeps sums of 0 and a maximum of -inf, as if there were
none. A sink is the initial state of the sums over chunks.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.contract import ATTENTION_CHUNK
from onpolicy.ops.layouts import AttentionLayout, PagedLayout, ScoreRule
from onpolicy.ops.triton.attention_split import attend_split, is_split
from onpolicy.ops.triton.attention_tiles import (
    before_all_chunks,
    chunk_sums,
    dim_block,
    first_block,
    load_queries,
    rows_of_tile,
    sequence_at,
    sequences,
    store_rows,
    unit_stride,
    with_next,
)
from onpolicy.ops.triton.device import UNFUSED, capability

LOG2_E = math.log2(math.e)

HOPPER_SHARED_MEMORY = 224 << 10
"""Bytes of shared memory for queries, keys and values; 3 KiB remain for the compiler."""


@triton.jit(do_not_specialize=["stride_table"])
def _attention_kernel(
    page_table: tl.tensor, key_lens: tl.tensor, query_starts: tl.tensor, stride_table: tl.tensor,
    q: tl.tensor, k: tl.tensor, v: tl.tensor,
    out: tl.tensor, lse: tl.tensor, sinks: tl.tensor, scale: tl.float32,
    stride_qt: tl.tensor, stride_qh: tl.tensor, stride_kr: tl.tensor, stride_kh: tl.tensor,
    stride_vr: tl.tensor, stride_vh: tl.tensor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
    DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
) -> None:  # fmt: skip
    sequence, kv_head = tl.program_id(2), tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # tiles with the most keys start first
    first_query, query_len, key_len, table = sequence_at(
        sequence, page_table, key_lens, query_starts, stride_table
    )
    if tile * ROWS >= query_len * GROUP:
        return
    query_rows, heads, positions, is_row = rows_of_tile(
        tile, kv_head, first_query, query_len, key_len, GROUP, ROWS
    )
    queries = load_queries(q + query_rows * stride_qt + heads * stride_qh, DIM, DIM_BLOCK)
    k += kv_head * stride_kh
    v += kv_head * stride_vh
    largest, total, mixed = before_all_chunks(sinks, heads, ROWS, VALUE_BLOCK, HAS_SINKS)
    end = key_len - query_len + tl.minimum((tile * ROWS + ROWS - 1) // GROUP, query_len - 1) + 1
    first = first_block(tl.min(positions, 0), KEYS, WINDOW)
    for chunk in range(first // CHUNK * CHUNK, end, CHUNK):
        begin, stop = tl.maximum(chunk, first), tl.minimum(chunk + CHUNK, end)
        next_largest, next_total, next_mixed = chunk_sums(
            queries, k, v, table, positions, begin, stop, scale, stride_kr, stride_vr,
            DIM, VALUE_DIM, PAGE_SIZE, ROWS, KEYS, DIM_BLOCK, VALUE_BLOCK, WINDOW, SOFTCAP,
        )  # fmt: skip
        largest, total, mixed = with_next(
            largest, total, mixed, next_largest, next_total, next_mixed
        )
    out_rows = query_rows * HEADS + heads
    store_rows(out, lse, largest, total, mixed, out_rows, is_row, VALUE_DIM, VALUE_BLOCK)


def blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: PagedLayout, scores: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Compute row-invariant causal attention without autograd; see `Operators.attention`.

    k: [rows, H_kv, D] and v: [rows, H_kv, D_v], the rows of all pages of `layout` end to end.
    Return (out [T, H, D_v], lse float32 [T, H]), the log of the softmax's normaliser.
    """
    q, k, v, sinks = unit_stride(q), unit_stride(k), unit_stride(v), scores.sinks
    (T, H, D), (_, kv_heads, value_dim) = q.shape, v.shape
    out, lse = q.new_empty(T, H, value_dim), q.new_empty(T, H, dtype=torch.float32)
    group = H // kv_heads
    if not T:
        return out, lse
    rows = 64 if q.dtype != torch.float32 else 32
    blocks = dim_block(D), dim_block(value_dim)
    wide = max(D, value_dim) > 128  # their sums leave registers for half a block
    keys = 32 if wide else rows
    tiles = triton.cdiv(layout.max_query_len * group, rows)
    tensors = q, k, v, out, lse, lse if sinks is None else sinks.contiguous()
    strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
    options = {
        "HEADS": H,
        "GROUP": group,
        "DIM": D,
        "VALUE_DIM": value_dim,
        "PAGE_SIZE": layout.page_size,
        "ROWS": rows,
        "KEYS": keys,
        "CHUNK": ATTENTION_CHUNK,
        "DIM_BLOCK": blocks[0],
        "VALUE_BLOCK": blocks[1],
        "WINDOW": scores.window or 0,
        "SOFTCAP": scores.softcap or 0.0,
        "HAS_SINKS": sinks is not None,
        "num_warps": _warps(q, max(D, value_dim)),
        "num_stages": 2 * _blocks_ahead(q, keys, *blocks) + 1,
        **UNFUSED,
    }
    scale = scores.scale * LOG2_E
    if is_split(layout, tiles * kv_heads):
        attend_split(layout, tensors, scale, strides, options)
        return out, lse
    grid = tiles, kv_heads, len(layout.key_lens)
    _attention_kernel[grid](*sequences(layout), *tensors, scale, *strides, **options)
    return out, lse


def _warps(q: Tensor, dim: int) -> int:
    """Return enough warps to hold a chunk's sums and the earlier chunks' sums in registers."""
    return 8 if dim > 128 or (dim > 64 and q.dtype != torch.float32) else 4


def _blocks_ahead(q: Tensor, keys: int, dim: int, value_dim: int) -> int:
    """Return how many blocks of keys are loaded while one is multiplied.

    A block that is not loaded far enough ahead stalls the loop, and a decode step does nothing
    else. The same loop loads the page table's entries, so that Triton takes two stages for each
    block.
    """
    if q.dtype == torch.float32:
        return 0
    if capability(q) < 90:  # 8.6 has the least shared memory
        return 1 if max(dim, value_dim) <= 128 else 0
    held = (HOPPER_SHARED_MEMORY // q.itemsize - 64 * dim) // (keys * (dim + value_dim))
    return min(3, held - 1)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scores: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Compute `blockwise_attention` over a layout of rows."""
    return blockwise_attention(q, k, v, layout.by_pages(), scores)
