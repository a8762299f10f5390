"""Attention to long sequences in chunks of FLASH_CHUNK keys, merged in the order of positions.

FlashAttention-3 sums all keys of a sequence and key head in one thread block, so one long sequence
leaves most of a GPU idle in decode. Here a chunk of keys, counted from the sequence's first token,
is a sequence of its own, with its log-sum-exp. A query sees the chunks before its own whole, and
its own up to itself: what is merged, and in which order, depends on its position alone. A chunk
that it does not see changes nothing, and a single one keeps its bits.

A decode step is one call, in which a causal mask hides nothing. Several queries take two calls: with
the mask for every query's own chunk, without it for the chunks before. So the kernels with and
without a mask must agree on keys that all are visible; the check at start-up compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.contract import FLASH_CHUNK
from onpolicy.errors import ContractError
from onpolicy.ops.layouts import PagedLayout, ScoreRule
from onpolicy.ops.triton.attention_tiles import sequence_at, sequences, with_next
from onpolicy.ops.triton.device import UNFUSED, next_power_of_2

MOST_PARTS = 1 << 14
"""Number of pairs of a query and a chunk whose results a prefill or the trainer holds at a time."""

Pairs = Literal["each", "own", "earlier"]
"""Which chunks a layout pairs with a query: each (decode), its own, or those before its own."""

Attend = Callable[..., tuple[Tensor, Tensor]]
"""(q [T, H, D], layout, causal, out [T, H, D] or nothing) -> out, lse float32 [H, T]. Of a sequence
without keys these are 0 and -inf."""


def is_cut(layout: PagedLayout, scores: ScoreRule) -> bool:
    """Return whether keys are attended to in chunks; a layer with a window keeps them whole.

    This depends on no tensor's contents, so a CUDA graph can hold it.
    """
    return scores.window is None and _chunks(layout) > 1


def _chunks(layout: PagedLayout) -> int:
    """Return an upper bound on a sequence's chunks, from the width of the page table alone."""
    return -(-layout.page_table.shape[1] * layout.page_size // FLASH_CHUNK)


def attend_in_chunks(
    attend: Attend, q: Tensor, layout: PagedLayout, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `attend` over all keys by calls over chunks of them; write to `out` if it is given."""
    chunks, (tokens, heads, _) = _chunks(layout), q.shape
    out = torch.empty_like(q) if out is None else out
    lse = q.new_empty(heads, tokens, dtype=torch.float32)
    if layout.max_query_len == 1:
        copies = q[:, None].expand(-1, chunks, -1, -1).flatten(0, 1)
        parts = attend(copies, layout=_cut(layout, "each"), causal=True)
        _merge(*parts, chunks, (1, chunks), out, lse)
        return out, lse
    step = max(1, MOST_PARTS // chunks)
    for first in range(0, tokens, step):
        rows = slice(first, first + step)
        some = layout if tokens <= step else _of_rows(layout, rows)
        parts = _parts(attend, q[rows], some, chunks)
        _merge(*parts, chunks, (len(q[rows]), 1), out[rows], lse[:, rows])
    return out, lse


def _parts(attend: Attend, q: Tensor, layout: PagedLayout, chunks: int) -> tuple[Tensor, Tensor]:
    """Return all chunks' results, own ones last: out [chunks * T, H, D], lse [H, chunks * T]."""
    parts, copies = q.new_empty(chunks, *q.shape), q.repeat(chunks - 1, 1, 1)
    earlier, own = parts[:-1].flatten(0, 1), parts[-1]
    _, own_lse = attend(q, layout=_cut(layout, "own"), causal=True, out=own)
    before = _cut(layout, "earlier", len(copies))
    _, earlier_lse = attend(copies, layout=before, causal=False, out=earlier)
    return parts.flatten(0, 1), torch.cat([earlier_lse, own_lse], 1)


def _of_rows(layout: PagedLayout, rows: slice) -> PagedLayout:
    """Return the layout of some query rows alone."""
    starts = layout.query_starts.clamp(rows.start, rows.stop) - rows.start
    later = layout.query_starts[1:] - rows.start - starts[1:]
    return replace(layout, key_lens=layout.key_lens - later, query_starts=starts)


def _cut(layout: PagedLayout, pairs: Pairs, rows: int = 0) -> PagedLayout:
    """Return the layout whose sequences are chunks of keys.

    each: every query once for each chunk, chunks of a query side by side. own: every query once.
    earlier: `rows` rows, all queries once for each chunk but the last, chunk after chunk; queries
    that do not come after the chunk are a sequence without keys.
    """
    pages, left = divmod(FLASH_CHUNK, layout.page_size)
    if left:
        raise ContractError(
            f"page_size={layout.page_size}: the chunks of {FLASH_CHUNK} keys that FlashAttention-3 "
            "reads must be whole pages. Use pages of 1."
        )
    is_earlier = pairs == "earlier"
    grid = _chunks(layout) - is_earlier, len(layout.key_lens)
    count = grid[0] * grid[1] * (1 + is_earlier)
    table = layout.page_table.new_empty(count, pages)
    lens, starts = layout.key_lens.new_empty(count), layout.query_starts.new_empty(count + 1)
    _cut_kernel[grid](
        *sequences(layout), layout.page_table.shape[1], rows, table, lens, starts,
        PAIRS=pairs, CHUNK=FLASH_CHUNK, PAGES=pages, PAGE_SIZE=layout.page_size, **UNFUSED,
    )  # fmt: skip
    return PagedLayout(
        page_table=table, page_size=layout.page_size, key_lens=lens, query_starts=starts,
        max_query_len=max(layout.max_query_len, rows),
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_table", "width", "rows"])
def _cut_kernel(
    page_table: tl.tensor, key_lens: tl.tensor, query_starts: tl.tensor, stride_table: tl.tensor,
    width: tl.tensor, rows: tl.tensor,
    cut_table: tl.tensor, cut_lens: tl.tensor, cut_starts: tl.tensor,
    PAIRS: tl.constexpr, CHUNK: tl.constexpr, PAGES: tl.constexpr, PAGE_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Write one chunk of one sequence, and the end of all queries after the last."""
    chunk, sequence = tl.program_id(0), tl.program_id(1)
    chunks, count = tl.num_programs(0), tl.num_programs(1)
    first, query_len, key_len, table = sequence_at(
        sequence, page_table, key_lens, query_starts, stride_table
    )
    begin, position = chunk * CHUNK, key_len - query_len
    if PAIRS == "earlier":
        at = (chunk * count + sequence) * 2
        start, end = chunk * (rows // chunks) + first, rows
        tl.store(cut_starts + at, start)
        tl.store(cut_lens + at, 0)
        at += 1
        start += tl.minimum(tl.maximum(begin + CHUNK - position, 0), query_len)
        held = tl.where(key_len > begin + CHUNK, CHUNK, 0)
    else:
        at = sequence * chunks + chunk
        held = tl.minimum(tl.maximum(key_len - begin, 0), CHUNK)
        if PAIRS == "own":
            start = first + tl.minimum(tl.maximum(begin - position, 0), query_len)
            end = first + query_len
        else:
            start, end = first * chunks + chunk * query_len, (first + query_len) * chunks
    tl.store(cut_starts + at, start)
    tl.store(cut_lens + at, held)
    tl.store(cut_starts + at + 1, end, mask=(chunk == chunks - 1) & (sequence == count - 1))
    pages = tl.arange(0, PAGES)
    is_page = (chunk * PAGES + pages < width) & (pages * PAGE_SIZE < held)
    found = tl.load(table + chunk * PAGES + pages, mask=is_page, other=0)
    tl.store(cut_table + at.to(tl.int64) * PAGES + pages, found, mask=(pages >= 0) & (held > 0))


def _merge(
    parts: Tensor, part_lse: Tensor, chunks: int, strides: tuple[int, int], out: Tensor, lse: Tensor
) -> None:
    """Merge all chunks of every query. strides: from a chunk, and from a query, to the next."""
    (tokens, heads, dim), rows = out.shape, 16
    _merge_kernel[(triton.cdiv(tokens * heads, rows),)](
        parts, part_lse, out, lse, tokens, chunks, *strides,
        part_lse.stride(0), lse.stride(0), *out.stride()[:2],
        HEADS=heads, DIM=dim, DIM_BLOCK=next_power_of_2(dim), ROWS=rows, **UNFUSED,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*range(4, 10)])
def _merge_kernel(
    parts: tl.tensor, part_lse: tl.tensor, out: tl.tensor, lse: tl.tensor,
    tokens: tl.tensor, chunks: tl.tensor, next_chunk: tl.tensor, next_query: tl.tensor,
    stride_part: tl.tensor, stride_lse: tl.tensor, stride_out: tl.tensor, stride_head: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Merge normalised results in ascending order; without any the result is 0, and its lse -inf."""
    pair, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
    query, head = (pair // HEADS).to(tl.int64), pair % HEADS
    is_row, is_dim = query < tokens, (dims < DIM)[None, :]
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    highest, total = largest, tl.zeros((ROWS,), dtype=tl.float32)
    mixed = tl.zeros((ROWS, DIM_BLOCK), dtype=tl.float32)
    for chunk in range(0, chunks):
        row = chunk * next_chunk + query * next_query
        one = tl.load(part_lse + head * stride_part + row, mask=is_row, other=float("-inf"))
        seen = one != float("-inf")
        values = tl.load(
            parts + ((row * HEADS + head) * DIM)[:, None] + dims[None, :],
            mask=seen[:, None] & is_dim,
            other=0.0,
        )
        highest = tl.maximum(highest, one)
        largest, total, mixed = with_next(
            largest, total, mixed, one * 1.4426950408889634, seen.to(tl.float32),
            values.to(tl.float32),
        )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)
    # Of a single chunk the log-sum-exp keeps its bits, whatever log(1) is on a device.
    highest += tl.where(total == 1.0, 0.0, tl.log(total))
    tl.store(lse + head * stride_lse + query, highest, mask=is_row)
    tl.store(
        out + (query * stride_out + head * stride_head)[:, None] + dims[None, :],
        (mixed / total[:, None]).to(out.dtype.element_ty),
        mask=is_row[:, None] & is_dim,
    )
