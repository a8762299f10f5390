"""The common parts of all attention kernels: a tile's rows, visible keys, and softmax over chunks.

Source of the formulas: FlashAttention-2 (Dao, 2023), within a chunk and between chunks alike.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from onpolicy.ops.layouts import PagedLayout
from onpolicy.ops.triton.device import next_power_of_2


def sequences(layout: PagedLayout) -> tuple[Any, ...]:
    """Return the first arguments of every attention kernel.

    They are the page table, key lengths, query starts and the page table's stride.
    """
    table = unit_stride(layout.page_table)
    return table, layout.key_lens, layout.query_starts, table.stride(0)


@triton.jit
def sequence_at(
    sequence: tl.tensor, page_table: tl.tensor, key_lens: tl.tensor, query_starts: tl.tensor,
    stride_table: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return a sequence's first query row, its numbers of queries and keys, and its page table row."""
    first = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - first
    table = page_table + sequence.to(tl.int64) * stride_table
    return first, query_len, tl.load(key_lens + sequence), table


@triton.jit
def rows_of_tile(
    tile: tl.tensor, kv_head: tl.tensor, first_query: tl.tensor, query_len: tl.tensor,
    key_len: tl.tensor,
    GROUP: tl.constexpr, ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return the query row, head and position of every row of a tile, and whether it exists.

    Rows past the end repeat the last token: they see a key, so nothing in them is 0 / 0.
    """
    rows = tile * ROWS + tl.arange(0, ROWS)
    tokens = tl.minimum(rows // GROUP, query_len - 1)
    heads = kv_head * GROUP + rows % GROUP
    positions = key_len - query_len + tokens
    return (first_query + tokens).to(tl.int64), heads, positions, rows < query_len * GROUP


@triton.jit
def load_queries(rows: tl.tensor, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr) -> tl.tensor:
    """Load [ROWS, DIM_BLOCK] from pointers to rows, all of which exist."""
    dims = tl.arange(0, DIM_BLOCK)
    return tl.load(rows[:, None] + dims[None, :], mask=(dims < DIM)[None, :], other=0.0)


@triton.jit
def key_rows(
    table: tl.tensor, keys: tl.tensor, is_key: tl.tensor, PAGE_SIZE: tl.constexpr
) -> tl.tensor:
    """Return the rows of the store that hold `keys` of a sequence, given its row of the page table."""
    pages = tl.load(table + keys // PAGE_SIZE, mask=is_key, other=0)
    return pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE


@triton.jit
def capped(scores: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Compute SOFTCAP * tanh(scores / SOFTCAP); scores and result are multiplied by log2(e)."""
    tanh = 1.0 - 2.0 / (tl.exp2(scores * (2.0 / SOFTCAP)) + 1.0)
    return tanh * (SOFTCAP * 1.4426950408889634)


@triton.jit
def is_visible(keys: tl.tensor, positions: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """Return which keys [KEYS] queries at positions [ROWS] see, including their own; WINDOW 0: all."""
    visible = keys[None, :] <= positions[:, None]
    if WINDOW:
        visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
    return visible


@triton.jit
def first_block(position: tl.tensor, KEYS: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """Return the first key of the first block in which a query at `position` sees a key."""
    if WINDOW:
        return tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS
    return position * 0


@triton.jit
def chunk_sums(
    queries: tl.tensor, k: tl.tensor, v: tl.tensor, table: tl.tensor, positions: tl.tensor,
    first: tl.tensor, end: tl.tensor, scale: tl.float32,
    stride_kr: tl.tensor, stride_vr: tl.tensor,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Compute the unnormalised softmax of a tile's rows over the keys from `first` to `end`.

    Return the largest score [ROWS], total [ROWS] and mixed values [ROWS, VALUE_BLOCK]; they are
    -inf, 0 and 0 for a row that sees none of the keys.
    """
    dims, value_dims = tl.arange(0, DIM_BLOCK), tl.arange(0, VALUE_BLOCK)
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    mixed = tl.zeros((ROWS, VALUE_BLOCK), dtype=tl.float32)
    # One loop for whole and masked blocks: the compiler would round two loops differently.
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
        base = tl.where(larger == float("-inf"), 0.0, larger)  # for rows that saw no key yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weights.to(v.dtype.element_ty), value_tile, mixed, input_precision="ieee")
        largest = larger
    return largest, total, mixed


@triton.jit
def with_next(
    largest: tl.tensor, total: tl.tensor, mixed: tl.tensor, next_largest: tl.tensor,
    next_total: tl.tensor, next_mixed: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Merge sums over keys with those over the chunk after them."""
    larger = tl.maximum(largest, next_largest)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    kept, added = tl.exp2(largest - base), tl.exp2(next_largest - base)
    total = total * kept + next_total * added
    mixed = mixed * kept[:, None] + next_mixed * added[:, None]
    return larger, total, mixed


@triton.jit
def before_all_chunks(
    sinks: tl.tensor, heads: tl.tensor,
    ROWS: tl.constexpr, VALUE_BLOCK: tl.constexpr, HAS_SINKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return the initial sums of rows: a sink, or nothing."""
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634
        total += 1.0
    return largest, total, tl.zeros((ROWS, VALUE_BLOCK), dtype=tl.float32)


@triton.jit
def store_rows(
    out: tl.tensor, lse: tl.tensor, largest: tl.tensor, total: tl.tensor, mixed: tl.tensor,
    out_rows: tl.tensor, is_row: tl.tensor,
    VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    value_dims = tl.arange(0, VALUE_BLOCK)
    mixed = mixed / total[:, None]
    tl.store(
        out + out_rows[:, None] * VALUE_DIM + value_dims[None, :],
        mixed.to(out.dtype.element_ty),
        mask=is_row[:, None] & (value_dims < VALUE_DIM)[None, :],
    )
    tl.store(lse + out_rows, (largest + tl.log2(total)) * 0.6931471805599453, mask=is_row)


def unit_stride(x: Tensor) -> Tensor:
    """Return `x` with its last axis contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dim_block(dim: int) -> int:
    """Round a head size up to a power of two of at least 16, the least that `tl.dot` takes."""
    return max(16, next_power_of_2(dim))
