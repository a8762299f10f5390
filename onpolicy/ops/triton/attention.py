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
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.ops.base import AttentionLayout, Scores
from onpolicy.ops.triton.device import UNFUSED, capability, next_power_of_2

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where the queries and keys of B sequences are, on the device that computes."""

    page_table: Tensor
    """int32 or int64 [B, >= pages]: page of the store that holds each run of `page_size` keys."""

    page_size: int

    key_lens: Tensor
    """int32 [B]: keys of each sequence, those of its queries included."""

    query_starts: Tensor
    """int32 [B + 1]: first query row of each sequence; its queries are its last tokens."""

    max_query_len: int
    """Upper bound on the queries of a sequence; sets the grid, so a constant under a CUDA graph."""

    @staticmethod
    def of(layout: AttentionLayout) -> Sequences:
        """The layout's rows as pages of one key each, kept for the model's other layers."""
        if Sequences not in layout.plans:
            device = layout.key_rows.device
            starts = torch.tensor([0, *layout.query_lens]).cumsum(0, dtype=torch.int32)
            layout.plans[Sequences] = Sequences(
                page_table=layout.key_rows,
                page_size=1,
                key_lens=torch.tensor(layout.key_lens, dtype=torch.int32).to(device),
                query_starts=starts.to(device),
                max_query_len=max(layout.query_lens),
            )
        sequences: Sequences = layout.plans[Sequences]
        return sequences

    def arguments(self) -> tuple[Any, ...]:
        """What every attention kernel takes first."""
        return self.page_table, self.key_lens, self.query_starts, self.page_table.stride(0)

    def __len__(self) -> int:
        return len(self.key_lens)


@triton.jit
def row_positions(
    tile: tl.tensor,
    query_len: tl.tensor,
    key_len: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of every row of a tile: query token, head in its group, position, and whether it exists.

    Rows past the end repeat the last token: they see a key, so nothing in them is 0 / 0.
    """
    rows = tile * ROWS + tl.arange(0, ROWS)
    tokens = tl.minimum(rows // GROUP, query_len - 1)
    return tokens, rows % GROUP, key_len - query_len + tokens, rows < query_len * GROUP


@triton.jit
def key_rows(
    table: tl.tensor, keys: tl.tensor, is_key: tl.tensor, PAGE_SIZE: tl.constexpr
) -> tl.tensor:
    """Rows of the store that hold `keys` of the sequence whose row of the page table this is."""
    pages = tl.load(table + keys // PAGE_SIZE, mask=is_key, other=0)
    return pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE


@triton.jit
def capped(scores: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """SOFTCAP * tanh(scores / SOFTCAP) of scores that, like the result, are multiplied by log2(e)."""
    tanh = 1.0 - 2.0 / (tl.exp2(scores * (2.0 / SOFTCAP)) + 1.0)
    return tanh * (SOFTCAP * 1.4426950408889634)


@triton.jit
def is_visible(keys: tl.tensor, positions: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """Which keys [KEYS] the queries at positions [ROWS] see, their own included; WINDOW 0: all."""
    visible = keys[None, :] <= positions[:, None]
    if WINDOW:
        visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
    return visible


@triton.jit
def first_block(position: tl.tensor, KEYS: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """The first key of the first block of which a query at `position` sees something."""
    if WINDOW:
        return tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS
    return position * 0


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


def unit_stride(x: Tensor) -> Tensor:
    """`x` with its last axis contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dim_block(dim: int) -> int:
    """A head size as a power of two of at least 16, the least that `tl.dot` takes."""
    return max(16, next_power_of_2(dim))


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
