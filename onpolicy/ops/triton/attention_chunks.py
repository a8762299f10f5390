"""A tile's softmax over one chunk of keys, and how chunks are put together: the same in every kernel.

Source of the formulas: FlashAttention-2 (Dao, 2023), inside a chunk and between chunks alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from onpolicy.ops.triton.attention_tiles import capped, is_visible, key_rows


@triton.jit
def chunk_sums(
    queries: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scale: tl.float32,
    stride_kr: tl.tensor,
    stride_vr: tl.tensor,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The softmax of a tile's rows over the keys from `first` to `end`, not normalised.

    Largest score [ROWS], total [ROWS] and mixed values [ROWS, VALUE_BLOCK]; -inf, 0 and 0 of a row that
    sees none of them.
    """
    dims, value_dims = tl.arange(0, DIM_BLOCK), tl.arange(0, VALUE_BLOCK)
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    mixed = tl.zeros((ROWS, VALUE_BLOCK), dtype=tl.float32)
    # One loop for whole and for masked blocks: the compiler would round two of them differently.
    for start in range(first, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < end
        rows = key_rows(table, keys, is_key, PAGE_SIZE)
        key_tile = tl.load(
            k + (rows * stride_kr)[None, :] + dims[:, None],
            mask=(dims < DIM)[:, None] & is_key[None, :],
            other=0.0,
        )
        value_tile = tl.load(
            v + (rows * stride_vr)[:, None] + value_dims[None, :],
            mask=is_key[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        scores = tl.dot(queries, key_tile, input_precision="ieee") * scale
        if SOFTCAP > 0.0:
            scores = capped(scores, SOFTCAP)
        scores = tl.where(is_visible(keys, positions, WINDOW), scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # of a row that saw nothing yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weights.to(v.dtype.element_ty), value_tile, mixed, input_precision="ieee")
        largest = larger
    return largest, total, mixed


@triton.jit
def with_next(
    largest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    next_largest: tl.tensor,
    next_total: tl.tensor,
    next_mixed: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Sums over keys and over the chunk after them, put together."""
    larger = tl.maximum(largest, next_largest)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    kept, added = tl.exp2(largest - base), tl.exp2(next_largest - base)
    total = total * kept + next_total * added
    mixed = mixed * kept[:, None] + next_mixed * added[:, None]
    return larger, total, mixed


@triton.jit
def before_all_chunks(
    sinks: tl.tensor,
    heads: tl.tensor,
    ROWS: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What the sums of rows begin with: a sink, or nothing."""
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634
        total += 1.0
    return largest, total, tl.zeros((ROWS, VALUE_BLOCK), dtype=tl.float32)


@triton.jit
def store_rows(
    out: tl.tensor,
    lse: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    out_rows: tl.tensor,
    is_row: tl.tensor,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
) -> None:
    value_dims = tl.arange(0, VALUE_BLOCK)
    mixed = mixed / total[:, None]
    tl.store(
        out + out_rows[:, None] * VALUE_DIM + value_dims[None, :],
        mixed.to(out.dtype.element_ty),
        mask=is_row[:, None] & (value_dims < VALUE_DIM)[None, :],
    )
    tl.store(lse + out_rows, (largest + tl.log2(total)) * 0.6931471805599453, mask=is_row)
