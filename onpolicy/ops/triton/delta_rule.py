"""The gated delta rule: one kernel for training, prefill, decode and the extension of a prefix.

Row invariance: a program owns one sequence, one value head and a block of values, and walks through
chunks of DELTA_CHUNK tokens, which begin at multiples of it from the sequence's first token. Inside
a chunk it computes tiles of TILE rows against all rows of the chunk. Rows that were computed in an
earlier call come from the state store, and rows that do not exist yet are zeros whose weights are
zeros, so a sum has the same shape and order whether its rows arrive together or one by one.

The formula is in `ops/recurrence.py`. A head's rows of the store hold, end to end, the state S at the
chunk's start, and u, k and g of the chunk that is not complete. S is read and written where it lies: a
whole one would leave a thread no registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.contract import DELTA_CHUNK
from onpolicy.ops.differentiable_delta import DeltaInputs
from onpolicy.ops.layouts import starts_of
from onpolicy.ops.recurrence import NORM_EPS, RecurrentLayout
from onpolicy.ops.triton.attention_tiles import dim_block
from onpolicy.ops.triton.device import UNFUSED, whole
from onpolicy.ops.triton.norm import TritonNorm

TILE = 16
"""Rows of a chunk that are computed at once: a decode step computes no more."""

DIM_SLICE = 16
"""Dimensions of keys that are multiplied at once: more would not stay in registers."""

VALUES = 32
"""Values of a head that one program computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayout:
    """Sequences on the device that computes. The host reads no tensor, so a CUDA graph can hold it."""

    starts: Tensor
    """int32 [S + 1]: first new token of each sequence, and the end of the last one."""

    past_lens: Tensor
    """int32 [S]: tokens of each sequence that its state holds."""

    slots: Tensor
    """int64 [S]: row of the state stores; any number where there are none."""

    max_query_len: int
    """Upper bound on the new tokens of a sequence; sets grids."""

    @staticmethod
    def of(layout: RecurrentLayout, device: torch.device) -> DeviceLayout:
        """Return a layout on the device, made once for all layers of a model."""
        if DeviceLayout not in layout.plans:
            count = len(layout.query_lens)
            slots = torch.arange(count) if layout.slots is None else layout.slots
            layout.plans[DeviceLayout] = DeviceLayout(
                starts=starts_of(layout.query_lens).to(device),
                past_lens=torch.tensor(layout.past_lens, dtype=torch.int32).to(device),
                slots=slots.to(device, torch.int64),
                max_query_len=max(layout.query_lens, default=0),
            )
        plan: DeviceLayout = layout.plans[DeviceLayout]
        return plan


@triton.jit
def sequence_of(
    sequence: tl.tensor, starts: tl.tensor, past_lens: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return where position 0 of a sequence would be among the tokens, and its lengths before and
    after the new tokens."""
    first, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    past = tl.load(past_lens + sequence)
    return first.to(tl.int64) - past, past, past + end - first


@triton.jit
def load_tile(
    x: tl.tensor, rows: tl.tensor, is_row: tl.tensor, columns: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """Load float32 [rows, columns] from pointers to rows; 0 where there is no row or no column."""
    mask = is_row[:, None] & (columns < SIZE)[None, :]
    return tl.load(x + rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(
    x: tl.tensor, values: tl.tensor, rows: tl.tensor, is_row: tl.tensor, columns: tl.tensor,
    SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Store what `load_tile` loads, rounded to the dtype of `x`."""
    mask = is_row[:, None] & (columns < SIZE)[None, :]
    tl.store(x + rows[:, None] + columns[None, :], values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def in_blocks(a: tl.tensor, b: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Compute [M, K] times [K, N] in blocks of K, added in the end: no thread holds a whole row."""
    blocks: tl.constexpr = a.shape[1] // SIZE
    left = tl.permute(tl.reshape(a, (a.shape[0], blocks, SIZE)), (1, 0, 2))
    right = tl.reshape(b, (blocks, SIZE, b.shape[1]))
    return tl.sum(tl.dot(left, right, input_precision="ieee"), 0)


@triton.jit
def _load_keys(
    k: tl.tensor, kept_k: tl.tensor, chunk: tl.tensor, past: tl.tensor, length: tl.tensor,
    dims: tl.tensor, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load keys [C, dims] of a chunk, from the store or among the new ones; others are 0."""
    rows = tl.arange(0, CHUNK)
    positions = (chunk + rows).to(tl.int64)
    is_new = (positions >= past) & (positions < length)
    keys = load_tile(k, positions * (KEY_HEADS * DIM), is_new, dims, DIM)
    return keys + load_tile(kept_k, rows * DIM, positions < past, dims, DIM)


@triton.jit
def _meet(
    q: tl.tensor, k: tl.tensor, kept_k: tl.tensor, state: tl.tensor, is_begun: tl.tensor,
    chunk: tl.tensor, past: tl.tensor, length: tl.tensor, at: tl.tensor, values: tl.tensor,
    KEY_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, DIM_BLOCK: tl.constexpr, DIM_SLICE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Multiply the new keys and queries of a tile, at positions `at`, with the chunk's keys, and with
    its state, which is 0 unless `is_begun`: [TILE, C] twice, then [TILE, values] twice."""
    slices = tl.arange(0, DIM_SLICE)
    is_row = (at >= past) & (at < length)
    overlap = tl.zeros((TILE, CHUNK), dtype=tl.float32)
    seen = tl.zeros((TILE, CHUNK), dtype=tl.float32)
    predicted = tl.zeros((TILE, VALUE_BLOCK), dtype=tl.float32)
    read = tl.zeros((TILE, VALUE_BLOCK), dtype=tl.float32)
    for first in range(0, DIM_BLOCK, DIM_SLICE):
        dims = first + slices
        keys = tl.trans(_load_keys(k, kept_k, chunk, past, length, dims, KEY_HEADS, DIM, CHUNK))
        tile_k = load_tile(k, at * (KEY_HEADS * DIM), is_row, dims, DIM)
        tile_q = load_tile(q, at * (KEY_HEADS * DIM), is_row, dims, DIM)
        part = load_tile(state, dims * VALUE_DIM, (dims < DIM) & is_begun, values, VALUE_DIM)
        overlap = tl.dot(tile_k, keys, overlap, input_precision="ieee")
        seen = tl.dot(tile_q, keys, seen, input_precision="ieee")
        predicted = tl.dot(tile_k, part, predicted, input_precision="ieee")
        read = tl.dot(tile_q, part, read, input_precision="ieee")
    return overlap, seen, predicted, read


@triton.jit
def _own_rows(overlap: tl.tensor, tile: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Return a tile's overlap [TILE, C] with its own rows, those before each alone: [TILE, TILE]."""
    tiles: tl.constexpr = overlap.shape[1] // TILE
    is_own = tl.arange(0, tiles)[None, :, None] == tile // TILE
    within = tl.sum(tl.where(is_own, tl.reshape(overlap, (TILE, tiles, TILE)), 0.0), 1)
    rows = tl.arange(0, TILE)
    return tl.where(rows[None, :] < rows[:, None], within, 0.0)


@triton.jit
def _with_tile(u: tl.tensor, tile_u: tl.tensor, tile: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Return u [C, values] with these rows of a tile."""
    spread = tl.broadcast_to(tile_u[None, :, :], (u.shape[0] // TILE, TILE, u.shape[1]))
    is_own = (tl.arange(0, u.shape[0]) // TILE == tile // TILE)[:, None]
    return tl.where(is_own, tl.reshape(spread, (u.shape[0], u.shape[1])), u)


@triton.jit
def _write_next_state(
    k: tl.tensor, kept_k: tl.tensor, state: tl.tensor, is_begun: tl.tensor, u: tl.tensor,
    logs: tl.tensor, chunk: tl.tensor, past: tl.tensor, length: tl.tensor, values: tl.tensor,
    KEY_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, DIM_BLOCK: tl.constexpr, DIM_SLICE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the state at a chunk's end over the one at its start."""
    last = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, logs, 0.0))
    until_end = tl.exp(last - logs)[:, None]
    slices = tl.arange(0, DIM_SLICE)
    tl.debug_barrier()  # all threads have read it
    for first in range(0, DIM_BLOCK, DIM_SLICE):
        dims = first + slices
        keys = _load_keys(k, kept_k, chunk, past, length, dims, KEY_HEADS, DIM, CHUNK) * until_end
        part = load_tile(state, dims * VALUE_DIM, (dims < DIM) & is_begun, values, VALUE_DIM)
        part = tl.exp(last) * part + in_blocks(tl.trans(keys), u, TILE)
        store_tile(state, part, dims * VALUE_DIM, dims < DIM, values, VALUE_DIM)
    tl.debug_barrier()  # all threads have written it


@triton.jit
def _solve(
    rest: tl.tensor, within: tl.tensor, rate: tl.tensor, u: tl.tensor, first: tl.tensor,
    end: tl.tensor, TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Compute rows `first` to `end` of u [TILE, values], given those before, one after another."""
    rows = tl.arange(0, TILE)
    for row in range(first, end):
        weights = tl.sum(tl.where(rows[:, None] == row, within, 0.0), 0)
        mixed = tl.sum(weights[:, None] * u, 0)[None, :]
        u = tl.where(rows[:, None] == row, rest - rate * mixed, u)
    return u


@triton.jit(
    do_not_specialize=["stride_slot", "stride_head", "keeps"],
    do_not_specialize_on_alignment=["starts", "past_lens", "slots", "states"],
)
def _delta_rule_kernel(
    starts: tl.tensor, past_lens: tl.tensor, slots: tl.tensor,
    q: tl.tensor, k: tl.tensor, v: tl.tensor, g: tl.tensor, beta: tl.tensor,
    states: tl.tensor, stride_slot: tl.tensor, stride_head: tl.tensor, keeps: tl.tensor,
    out: tl.tensor,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
    DIM_BLOCK: tl.constexpr, DIM_SLICE: tl.constexpr, VALUE_BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    origin, past, length = sequence_of(sequence, starts, past_lens)
    state = states + tl.load(slots + sequence) * stride_slot + head * stride_head
    kept_u = state + DIM * VALUE_DIM
    kept_k = kept_u + CHUNK * VALUE_DIM
    kept_g = kept_k + tl.cdiv(CHUNK * DIM, VALUE_DIM) * VALUE_DIM
    q += (origin * KEY_HEADS + head // (HEADS // KEY_HEADS)) * DIM
    k += (origin * KEY_HEADS + head // (HEADS // KEY_HEADS)) * DIM
    of_head = origin * HEADS + head
    rows, tile_rows = tl.arange(0, CHUNK), tl.arange(0, TILE)
    values = tl.program_id(0) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    u = tl.zeros((CHUNK, VALUE_BLOCK), dtype=tl.float32)
    for chunk in range(past // CHUNK * CHUNK, length, CHUNK):
        is_begun = chunk > 0  # a sequence's first state is 0, whatever the store holds
        positions = (chunk + rows).to(tl.int64)
        is_new = (positions >= past) & (positions < length)
        logs = tl.load(g + of_head + positions * HEADS, mask=is_new, other=0.0)
        logs = tl.cumsum(logs + tl.load(kept_g + rows, mask=positions < past, other=0.0), 0)
        u = load_tile(kept_u, rows * VALUE_DIM, positions < past, values, VALUE_DIM)
        begin, end = tl.maximum(past - chunk, 0), tl.minimum(length - chunk, CHUNK)
        for tile in range(begin // TILE * TILE, end, TILE):
            in_chunk = tile + tile_rows
            at = (chunk + in_chunk).to(tl.int64)
            overlap, seen, predicted, read = _meet(
                q, k, kept_k, state, is_begun, chunk, past, length, at, values, KEY_HEADS,
                DIM, VALUE_DIM, CHUNK, TILE, DIM_BLOCK, DIM_SLICE, VALUE_BLOCK,
            )  # fmt: skip
            tile_logs = tl.sum(tl.where(in_chunk[:, None] == rows[None, :], logs[None, :], 0.0), 1)
            difference = tile_logs[:, None] - logs[None, :]
            is_seen = rows[None, :] <= in_chunk[:, None]
            decay = tl.exp(tl.where(is_seen, difference, float("-inf")))
            since_start = tl.exp(tile_logs)[:, None]
            is_row, of_tile = (at >= past) & (at < length), of_head + at * HEADS
            rate = tl.load(beta + of_tile, mask=is_row, other=0.0)[:, None]
            rest = load_tile(v, of_tile * VALUE_DIM, is_row, values, VALUE_DIM)
            overlap *= decay
            earlier = in_blocks(tl.where(rows[None, :] < tile, overlap, 0.0), u, TILE)
            rest = rate * (rest - since_start * predicted - earlier)
            tile_u = load_tile(kept_u, in_chunk * VALUE_DIM, at < past, values, VALUE_DIM)
            first, stop = tl.maximum(begin - tile, 0), tl.minimum(end - tile, TILE)
            tile_u = _solve(rest, _own_rows(overlap, tile, TILE), rate, tile_u, first, stop, TILE)
            u = _with_tile(u, tile_u, tile, TILE)
            result = since_start * read + in_blocks(seen * decay, u, TILE)
            store_tile(out, result, of_tile * VALUE_DIM, is_row, values, VALUE_DIM)
        if chunk + CHUNK <= length:
            _write_next_state(
                k, kept_k, state, is_begun, u, logs, chunk, past, length, values, KEY_HEADS,
                DIM, VALUE_DIM, CHUNK, TILE, DIM_BLOCK, DIM_SLICE,
            )  # fmt: skip
    at = length // CHUNK * CHUNK + rows
    is_new = (keeps > 0) & (at >= past) & (at < length)
    store_tile(kept_u, u, rows * VALUE_DIM, is_new, values, VALUE_DIM)


@triton.jit(
    do_not_specialize=["stride_slot", "stride_head"],
    do_not_specialize_on_alignment=["starts", "past_lens", "slots", "states"],
)
def _keep_kernel(
    starts: tl.tensor, past_lens: tl.tensor, slots: tl.tensor, k: tl.tensor, g: tl.tensor,
    states: tl.tensor, stride_slot: tl.tensor, stride_head: tl.tensor,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, DIM_BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Keep keys and decays of the chunk that is not complete, which all programs of a head have read."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    origin, past, length = sequence_of(sequence, starts, past_lens)
    kept_k = states + tl.load(slots + sequence) * stride_slot + head * stride_head
    kept_k += (DIM + CHUNK) * VALUE_DIM
    kept_g = kept_k + tl.cdiv(CHUNK * DIM, VALUE_DIM) * VALUE_DIM
    dims, rows = tl.arange(0, DIM_BLOCK), tl.arange(0, CHUNK)
    positions = (length // CHUNK * CHUNK + rows).to(tl.int64)
    is_new = (positions >= past) & (positions < length)
    k += (origin * KEY_HEADS + head // (HEADS // KEY_HEADS)) * DIM
    keys = load_tile(k, positions * (KEY_HEADS * DIM), is_new, dims, DIM)
    store_tile(kept_k, keys, rows * DIM, is_new, dims, DIM)
    logs = tl.load(g + origin * HEADS + head + positions * HEADS, mask=is_new, other=0.0)
    tl.store(kept_g + rows, logs, mask=is_new)


def _sizes(k: Tensor, v: Tensor) -> dict[str, int]:
    """Return the sizes for which kernels are compiled, and options: k [T, H_k, D], v [T, H, D_v]."""
    return {
        "KEY_HEADS": k.shape[1],
        "HEADS": v.shape[1],
        "DIM": k.shape[2],
        "VALUE_DIM": v.shape[2],
        "CHUNK": DELTA_CHUNK,
        "DIM_BLOCK": dim_block(k.shape[2]),
        "num_warps": 4,
        "num_stages": 1,
        **UNFUSED,
    }


def unit(x: Tensor, scale: float) -> Tensor:
    """Return rows of length `scale` in float32: [T, H, D] -> [T, H, D], by the kernel of RMS norms."""
    dim = x.shape[-1]
    weight = x.new_full((dim,), scale * dim**-0.5, dtype=torch.float32)
    out: Tensor = TritonNorm.apply(x.float(), weight, None, NORM_EPS / dim, True)
    return out


@torch.no_grad()
def blockwise_delta_rule(
    inputs: DeltaInputs, layout: RecurrentLayout, states: Tensor | None = None
) -> Tensor:
    """Compute `Operators.gated_delta` and update the states; no autograd."""
    q, k = unit(inputs.q, inputs.q.shape[2] ** -0.5), unit(inputs.k, 1.0)
    v, g, beta = whole(inputs.v), whole(inputs.g), whole(inputs.beta.float())
    out, sizes, keeps = torch.empty_like(v), _sizes(k, v), states is not None
    (_, heads, value_dim), on_device = v.shape, DeviceLayout.of(layout, v.device)
    where = on_device.starts, on_device.past_lens, on_device.slots
    if states is None:
        states = g.new_empty(len(on_device.slots), heads, k.shape[2], value_dim)
    assert states[:1, :1].is_contiguous()
    store = states, *states.stride()[:2]
    values = min(VALUES, dim_block(value_dim))
    grid = triton.cdiv(value_dim, values), heads, len(on_device.slots)
    if len(v):
        _delta_rule_kernel[grid](
            *where, q, k, v, g, beta, *store, int(keeps), out, TILE=TILE, DIM_SLICE=DIM_SLICE,
            VALUE_BLOCK=values, **sizes,
        )  # fmt: skip
    if len(v) and keeps:
        _keep_kernel[grid[1:]](*where, k, g, *store, **sizes)
    return out
