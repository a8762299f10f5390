"""Attention of decode steps over long contexts: chunks of keys in parallel, then merged.

One program would walk through all keys of a sequence while most of the device waits. Here programs
share the chunks, and a second kernel merges these in the order of positions. Both use the functions
of `attention_tiles.py`, so the choice between them and `attention.py` decides no bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.contract import ATTENTION_CHUNK
from onpolicy.ops.layouts import PagedLayout
from onpolicy.ops.triton.attention_tiles import (
    before_all_chunks,
    chunk_sums,
    first_block,
    load_queries,
    rows_of_tile,
    sequence_at,
    sequences,
    store_rows,
    with_next,
)

FEW_PROGRAMS = 264
"""Number of programs below which a step is split: two for each multiprocessor of an H100."""

MAX_PARTS = 64
"""Maximum number of programs that share the chunks of one sequence and head."""

REDUCED = (
    *("HEADS", "GROUP", "VALUE_DIM", "ROWS", "KEYS", "CHUNK", "VALUE_BLOCK", "WINDOW", "HAS_SINKS"),
    *("num_warps", "enable_fp_fusion"),
)
"""Options of the second kernel."""


def is_split(layout: PagedLayout, programs: int) -> bool:
    """Return whether a decode step with this many programs per sequence leaves most of a device idle.

    The result depends on no tensor's contents, so a CUDA graph can hold it.
    """
    is_decode, is_small = layout.max_query_len == 1, programs * len(layout.key_lens) < FEW_PROGRAMS
    return is_decode and is_small and _max_chunks(layout) > 1


def _max_chunks(layout: PagedLayout) -> int:
    """Return an upper bound on a sequence's chunks, from the width of the page table alone."""
    return -(-layout.page_table.shape[1] * layout.page_size // ATTENTION_CHUNK)


def attend_split(
    layout: PagedLayout,
    tensors: tuple[Tensor, ...],
    scale: float,
    strides: tuple[int, ...],
    options: dict[str, Any],
) -> None:
    """Write `out` and `lse` of a decode step, from the arguments of the kernel in `attention.py`.

    tensors: q, k, v, out [T, H, D_v], lse float32 [T, H], sinks.
    """
    q, k, v, out, lse, sinks = tensors
    chunks = _max_chunks(layout)
    parts = min(chunks, MAX_PARTS)
    largest, total = lse.new_empty(2, *lse.shape, chunks)
    mixed = out.new_empty(*out.shape[:2], chunks, out.shape[2], dtype=torch.float32)
    sums = largest, total, mixed, chunks
    tiles = triton.cdiv(options["GROUP"], options["ROWS"])
    shape = options["HEADS"] // options["GROUP"], len(layout.key_lens)
    _chunks_kernel[(parts * tiles, *shape)](
        *sequences(layout), q, k, v, *sums, scale, *strides, TILES=tiles,
        **{name: value for name, value in options.items() if name != "HAS_SINKS"},
    )  # fmt: skip
    _reduce_kernel[(tiles, *shape)](
        *sequences(layout), *sums, out, lse, sinks, **{name: options[name] for name in REDUCED}
    )


@triton.jit(do_not_specialize=["stride_table", "max_chunks"])
def _chunks_kernel(
    page_table: tl.tensor, key_lens: tl.tensor, query_starts: tl.tensor, stride_table: tl.tensor,
    q: tl.tensor, k: tl.tensor, v: tl.tensor,
    largest: tl.tensor, total: tl.tensor, mixed: tl.tensor, max_chunks: tl.tensor,
    scale: tl.float32,
    stride_qt: tl.tensor, stride_qh: tl.tensor, stride_kr: tl.tensor, stride_kh: tl.tensor,
    stride_vr: tl.tensor, stride_vh: tl.tensor,
    TILES: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
) -> None:  # fmt: skip
    """Sum over every `parts`-th chunk of a sequence, each by itself."""
    sequence, kv_head = tl.program_id(2), tl.program_id(1)
    tile, part = tl.program_id(0) % TILES, tl.program_id(0) // TILES
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
    value_dims = tl.arange(0, VALUE_BLOCK)
    first = first_block(tl.min(positions, 0), KEYS, WINDOW)
    parts = tl.num_programs(0) // TILES
    for chunk in range(first // CHUNK + part, tl.cdiv(key_len, CHUNK), parts):
        begin, stop = tl.maximum(chunk * CHUNK, first), tl.minimum((chunk + 1) * CHUNK, key_len)
        chunk_largest, chunk_total, chunk_mixed = chunk_sums(
            queries, k, v, table, positions, begin, stop, scale, stride_kr, stride_vr,
            DIM, VALUE_DIM, PAGE_SIZE, ROWS, KEYS, DIM_BLOCK, VALUE_BLOCK, WINDOW, SOFTCAP,
        )  # fmt: skip
        rows = (query_rows * HEADS + heads) * max_chunks + chunk
        tl.store(largest + rows, chunk_largest, mask=is_row)
        tl.store(total + rows, chunk_total, mask=is_row)
        tl.store(
            mixed + rows[:, None] * VALUE_DIM + value_dims[None, :],
            chunk_mixed,
            mask=is_row[:, None] & (value_dims < VALUE_DIM)[None, :],
        )


@triton.jit(do_not_specialize=["stride_table", "max_chunks"])
def _reduce_kernel(
    page_table: tl.tensor, key_lens: tl.tensor, query_starts: tl.tensor, stride_table: tl.tensor,
    largest: tl.tensor, total: tl.tensor, mixed: tl.tensor, max_chunks: tl.tensor,
    out: tl.tensor, lse: tl.tensor, sinks: tl.tensor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, CHUNK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Merge the chunks of a sequence, in ascending order."""
    sequence, kv_head, tile = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    first_query, query_len, key_len, _ = sequence_at(
        sequence, page_table, key_lens, query_starts, stride_table
    )
    if tile * ROWS >= query_len * GROUP:
        return
    query_rows, heads, positions, is_row = rows_of_tile(
        tile, kv_head, first_query, query_len, key_len, GROUP, ROWS
    )
    out_rows = query_rows * HEADS + heads
    value_dims = tl.arange(0, VALUE_BLOCK)
    is_value = (value_dims < VALUE_DIM)[None, :]
    row_largest, row_total, row_mixed = before_all_chunks(
        sinks, heads, ROWS, VALUE_BLOCK, HAS_SINKS
    )
    first = first_block(tl.min(positions, 0), KEYS, WINDOW)
    for chunk in range(first // CHUNK, tl.cdiv(key_len, CHUNK)):
        rows = out_rows * max_chunks + chunk
        row_largest, row_total, row_mixed = with_next(
            row_largest,
            row_total,
            row_mixed,
            tl.load(largest + rows),
            tl.load(total + rows),
            tl.load(
                mixed + rows[:, None] * VALUE_DIM + value_dims[None, :], mask=is_value, other=0.0
            ),
        )
    store_rows(
        out, lse, row_largest, row_total, row_mixed, out_rows, is_row, VALUE_DIM, VALUE_BLOCK
    )
