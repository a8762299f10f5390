"""The gated delta rule: one kernel for training, prefill, decode and the extension of a prefix.

Row invariance: a program owns one sequence, one value head and a block of values, and walks through
chunks of DELTA_CHUNK tokens, which begin at multiples of it from the sequence's first token. Inside
a chunk it computes tiles of TILE rows against all rows of the chunk. Rows that were computed in an
earlier call come from the state store, and rows that do not exist yet are zeros whose weights are
zeros, so a sum has the same shape and order whether its rows arrive together or one by one.

    G_i = G_{i-1} + g_i
    u_i = beta_i (v_i - exp(G_i) S^T k_i - sum_{j<i} exp(G_i - G_j) (k_j . k_i) u_j)
    o_i = exp(G_i) S^T q_i + sum_{j<=i} exp(G_i - G_j) (q_i . k_j) u_j
    S'  = exp(G_C) S + sum_j exp(G_C - G_j) k_j u_j^T

S is the state at the chunk's start, S' the one at its end. (Source: Gated Delta Networks, Yang et
al., 2024, section 3.3, with u solved row by row.) A slot of the store holds, as float32 and end to end, S [D,
D_v], u [C, D_v], k [C, D] and g [C] of the chunk that is not complete.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.ops.triton.device import UNFUSED, whole
from onpolicy.ops.triton.attention_tiles import dim_block

DELTA_CHUNK = 64

TILE = 16
"""Rows of a chunk that are computed at once: a decode step computes no more."""

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
    """int64 [S]: row of the state store; -1: nothing is read or kept."""


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
def product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def row_at(x: tl.tensor, rows: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return one row [N] of a tile [rows, N]."""
    return tl.sum(tl.where(rows[:, None] == row, x, 0.0), 0)


@triton.jit(
    do_not_specialize=["stride_slot", "stride_head", "records"],
    do_not_specialize_on_alignment=["starts", "past_lens", "slots", "states"],
)
def _delta_rule_kernel(
    starts: tl.tensor, past_lens: tl.tensor, slots: tl.tensor,
    q: tl.tensor, k: tl.tensor, v: tl.tensor, g: tl.tensor, beta: tl.tensor,
    states: tl.tensor, stride_slot: tl.tensor, stride_head: tl.tensor, out: tl.tensor,
    chunk_states: tl.tensor, updates: tl.tensor, records: tl.tensor,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
    DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    head, sequence = tl.program_id(1), tl.program_id(2)
    origin, past, length = sequence_of(sequence, starts, past_lens)
    slot = tl.load(slots + sequence)
    kept = states + slot * stride_slot + head * stride_head
    kept_u = kept + DIM * VALUE_DIM
    kept_k = kept_u + CHUNK * VALUE_DIM
    kept_g = kept_k + CHUNK * DIM
    readable = tl.where(slot < 0, 0, past)
    q += (origin * KEY_HEADS + head // (HEADS // KEY_HEADS)) * DIM
    k += (origin * KEY_HEADS + head // (HEADS // KEY_HEADS)) * DIM
    of_head = origin * HEADS + head
    dims, rows, tile_rows = tl.arange(0, DIM_BLOCK), tl.arange(0, CHUNK), tl.arange(0, TILE)
    values = tl.program_id(0) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    is_dim = dims < DIM
    state = load_tile(kept, dims * VALUE_DIM, is_dim & (readable > 0), values, VALUE_DIM)
    u = tl.zeros((CHUNK, VALUE_BLOCK), dtype=tl.float32)
    recorded = chunk_states + ((origin + past) // CHUNK + sequence) * (HEADS * DIM * VALUE_DIM)
    recorded += head * (DIM * VALUE_DIM)
    for chunk in range(past // CHUNK * CHUNK, length, CHUNK):
        positions = (chunk + rows).to(tl.int64)
        is_old, is_new = positions < readable, (positions >= past) & (positions < length)
        logs = tl.load(g + of_head + positions * HEADS, mask=is_new, other=0.0)
        logs = tl.cumsum(logs + tl.load(kept_g + rows, mask=is_old, other=0.0), 0)
        keys = load_tile(k, positions * (KEY_HEADS * DIM), is_new, dims, DIM)
        keys = tl.trans(keys + load_tile(kept_k, rows * DIM, is_old, dims, DIM))
        u = load_tile(kept_u, rows * VALUE_DIM, is_old, values, VALUE_DIM)
        store_tile(
            recorded, state, dims * VALUE_DIM, is_dim & (records > 0), values, VALUE_DIM
        )
        recorded += HEADS * DIM * VALUE_DIM
        begin, end = tl.maximum(past - chunk, 0), tl.minimum(length - chunk, CHUNK)
        for tile in range(begin // TILE * TILE, end, TILE):
            in_chunk = tile + tile_rows
            at = (chunk + in_chunk).to(tl.int64)
            is_row = (at >= past) & (at < length)
            tile_k = load_tile(k, at * (KEY_HEADS * DIM), is_row, dims, DIM)
            tile_q = load_tile(q, at * (KEY_HEADS * DIM), is_row, dims, DIM)
            at = of_head + at * HEADS
            tile_v = load_tile(v, at * VALUE_DIM, is_row, values, VALUE_DIM)
            rate = tl.load(beta + at, mask=is_row, other=0.0)[:, None]
            tile_logs = tl.sum(tl.where(in_chunk[:, None] == rows[None, :], logs[None, :], 0.0), 1)
            is_seen = rows[None, :] <= in_chunk[:, None]
            decay = tl.exp(
                tl.where(is_seen, tile_logs[:, None] - logs[None, :], float("-inf"))
            )
            shrink = tl.exp(tile_logs)[:, None]
            overlap = product(tile_k, keys) * decay
            earlier = product(tl.where(rows[None, :] < tile, overlap, 0.0), u)
            rest = rate * (tile_v - shrink * product(tile_k, state) - earlier)
            within = tl.reshape(overlap, (TILE, CHUNK // TILE, TILE))
            is_tile = tl.arange(0, CHUNK // TILE)[None, :, None] == tile // TILE
            within = tl.sum(tl.where(is_tile, within, 0.0), 1)
            within = tl.where(tile_rows[None, :] < tile_rows[:, None], within, 0.0)
            is_kept = chunk + in_chunk < readable
            tile_u = load_tile(kept_u, in_chunk * VALUE_DIM, is_kept, values, VALUE_DIM)
            for row in range(tl.maximum(begin - tile, 0), tl.minimum(end - tile, TILE)):
                mixed = tl.sum(row_at(within, tile_rows, row)[:, None] * tile_u, 0)[None, :]
                tile_u = tl.where(tile_rows[:, None] == row, rest - rate * mixed, tile_u)
            spread = tl.broadcast_to(tile_u[None, :, :], (CHUNK // TILE, TILE, VALUE_BLOCK))
            spread = tl.reshape(spread, (CHUNK, VALUE_BLOCK))
            u = tl.where((rows // TILE == tile // TILE)[:, None], spread, u)
            seen = product(product(tile_q, keys) * decay, u)
            result = shrink * product(tile_q, state) + seen
            store_tile(out, result, at * VALUE_DIM, is_row, values, VALUE_DIM)
            store_tile(updates, tile_u, at * VALUE_DIM, is_row & (records > 0), values, VALUE_DIM)
        if chunk + CHUNK <= length:
            last = tl.sum(tl.where(rows == CHUNK - 1, logs, 0.0))
            state = tl.exp(last) * state + product(keys * tl.exp(last - logs)[None, :], u)
    tl.debug_barrier()  # the store was read by other threads of this program
    is_changed = (slot >= 0) & ((past == 0) | (past // CHUNK < length // CHUNK))
    store_tile(kept, state, dims * VALUE_DIM, is_dim & is_changed, values, VALUE_DIM)
    at = length // CHUNK * CHUNK + rows
    is_new = (slot >= 0) & (at >= past) & (at < length)
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
    slot = tl.load(slots + sequence)
    kept = states + slot * stride_slot + head * stride_head
    kept_k = kept + (DIM + CHUNK) * VALUE_DIM
    dims, rows = tl.arange(0, DIM_BLOCK), tl.arange(0, CHUNK)
    positions = (length // CHUNK * CHUNK + rows).to(tl.int64)
    is_new = (slot >= 0) & (positions >= past) & (positions < length)
    k += (origin * KEY_HEADS + head // (HEADS // KEY_HEADS)) * DIM
    keys = load_tile(k, positions * (KEY_HEADS * DIM), is_new, dims, DIM)
    store_tile(kept_k, keys, rows * DIM, is_new, dims, DIM)
    logs = tl.load(g + origin * HEADS + head + positions * HEADS, mask=is_new, other=0.0)
    tl.store(kept_k + CHUNK * DIM + rows, logs, mask=is_new)


def sizes_of(k: Tensor, v: Tensor) -> dict[str, int]:
    """Return the sizes that every kernel of the rule is compiled for: k: [T, H_k, D], v: [T, H, D_v]."""
    return {
        "KEY_HEADS": k.shape[1],
        "HEADS": v.shape[1],
        "DIM": k.shape[2],
        "VALUE_DIM": v.shape[2],
        "CHUNK": DELTA_CHUNK,
        "DIM_BLOCK": dim_block(k.shape[2]),
        "num_stages": 1,
    }


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    layout: DeviceLayout,
    states: Tensor | None,
    record: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute the rule for normalised queries and keys, and update the states; no autograd.

    q, k: float32 [T, H_k, D]; v: [T, H, D_v]; g, beta: float32 [T, H]; states: float32 [slots, H,
    R, D_v] -> [T, H, D_v], as v. record: float32 [T // C + S, H, D, D_v], which gets the states at
    the starts of chunks, and float32 [T, H, D_v], which gets u.
    """
    q, k, v, g, beta = map(whole, (q, k, v, g, beta))
    out, sizes = torch.empty_like(v), sizes_of(k, v)
    where = layout.starts, layout.past_lens, layout.slots
    store = g if states is None else states
    strides = (0, 0) if states is None else states.stride()[:2]
    values = min(VALUES, dim_block(v.shape[2]))
    recorded = (g, g, 0) if record is None else (*record, 1)
    grid = triton.cdiv(v.shape[2], values), v.shape[1], len(layout.slots)
    _delta_rule_kernel[grid](
        *where, q, k, v, g, beta, store, *strides, out, *recorded, TILE=TILE,
        VALUE_BLOCK=values, num_warps=4, **sizes, **UNFUSED,
    )  # fmt: skip
    if states is not None:
        _keep_kernel[grid[1:]](
            *where, k, g, store, *strides, num_warps=4, **sizes, **UNFUSED
        )
    return out
