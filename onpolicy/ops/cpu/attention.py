"""Causal attention on a CPU, batched over sequences, with a fixed order of every sum.

A query row is one query token of one head. Keys are visited in blocks of 64 that start at absolute
positions 0, 64, ... of the sequence, so the order of the sums over keys depends on the row's own
position and on nothing else:

    m   = max_j  q.k_j                    exact in any order
    p_j = exp(q.k_j - m), 0 where j > position
    o   = sum over blocks, in order, of p_block @ v_block;  the normaliser likewise

Blocks after the row's position add exact zeros, so it does not matter how long the other
sequences of the batch are. Rows are padded to a multiple of 16, the size from which a
single-threaded GEMM gives a row the same bits whatever rows surround it (the self-check tries all
of them). Prefill, chunked prefill with a cached prefix, decode and training run this one function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.base import AttentionLayout
from onpolicy.ops.cpu.threads import PiecePool

KEY_BLOCK = 64
ROW_MULTIPLE = 16
MAX_ROWS = 256
ROW_BLOCK = 64
"""Query rows of one product in the backward pass, where keys and values sum over them."""

CHUNK_FLOATS = 1 << 22
"""Upper bound for the gathered keys of one chunk of sequences (16 MiB), unless one is larger."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of one call. H_kv groups of G query heads share a key head."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


class _Chunk:
    """Some sequences of a layout, longest queries first, and the tiles of query rows to compute.

    Holds indices only, so that all layers of a forward pass share it.
    """

    def __init__(self, layout: AttentionLayout, sequences: Sequence[int], shape: _Shape):
        self.shape = shape
        chosen = torch.tensor(sequences)
        query_lens = torch.tensor(layout.query_lens)[chosen]
        key_lens = torch.tensor(layout.key_lens)[chosen]
        query_starts = torch.tensor([0, *layout.query_lens]).cumsum(0)[chosen]
        self.num_blocks = -(-int(key_lens.max()) // KEY_BLOCK)
        # Padding repeats the sequence's last key: its weight is 0, and 0 times another sequence's
        # value would not be 0 if that were not finite.
        slots = torch.arange(self.num_blocks * KEY_BLOCK)
        self.is_key = slots < key_lens[:, None]
        rows = layout.key_rows[chosen[:, None], torch.minimum(slots, key_lens[:, None] - 1)]
        self.key_rows = rows
        rows = rows.view(-1, self.num_blocks, 1, KEY_BLOCK).transpose(0, 1)
        heads = torch.arange(shape.kv_heads).view(1, 1, -1, 1)
        self._gathered = (rows * shape.kv_heads + heads).reshape(-1)
        longest = int(query_lens[0])
        step = max(1, min(longest, MAX_ROWS // shape.group))
        self.tiles = [
            _Tile(shape, first, step, query_lens, query_starts, key_lens)
            for first in range(0, longest, step)
        ]

    def gather_blocks(self, store: Tensor) -> Tensor:
        """Rows of the key or value store as float32 [blocks, B, 64, D]; B: sequence x key head."""
        blocks = store.view(-1, store.shape[-1]).index_select(0, self._gathered).float()
        return blocks.view(self.num_blocks, -1, KEY_BLOCK, store.shape[-1])

    def scatter_blocks(self, blocks: Tensor, store: Tensor) -> None:
        """The inverse of `gather_blocks`, for gradients: write every key's row of `store`."""
        by_key = blocks.view(self.num_blocks, -1, self.shape.kv_heads, KEY_BLOCK, blocks.shape[-1])
        by_key = by_key.permute(1, 0, 3, 2, 4).reshape(*self.key_rows.shape, *store.shape[1:])
        store[self.key_rows[self.is_key]] = by_key[self.is_key].to(store.dtype)


class _Tile:
    """Up to 256 // G consecutive query tokens of every sequence of a chunk that has so many.

    Together B = (sequences x key heads) matrices of R = (tokens x G) rows, padded for the GEMMs.
    """

    def __init__(
        self,
        shape: _Shape,
        first: int,
        tokens: int,
        query_lens: Tensor,
        query_starts: Tensor,
        key_lens: Tensor,
    ):
        self.shape, self.tokens = shape, tokens
        self.rows = tokens * shape.group
        self.padding = -self.rows % ROW_MULTIPLE
        count = int((query_lens > first).sum())
        self.batch = count * shape.kv_heads
        lens, starts, keys = (x[:count, None] for x in (query_lens, query_starts, key_lens))
        slots = first + torch.arange(tokens)
        self.is_query = slots < lens
        slots = torch.minimum(slots, lens - 1)  # padding repeats the sequence's last query
        self._gathered = (starts + slots).reshape(-1)
        self._kept = self.is_query.reshape(-1).nonzero()[:, 0]
        self._scattered = self._gathered[self._kept]
        self._positions = (keys - lens + slots).repeat_interleave(shape.group, dim=1)
        self._first_masked = int(self._positions.min()) // KEY_BLOCK
        self.num_blocks = int(self._positions.max()) // KEY_BLOCK + 1

    def gather(self, x: Tensor) -> Tensor:
        """Rows of [T, H, D] as float32 [B, R, D]."""
        rows = x.index_select(0, self._gathered).float()
        rows = rows.view(-1, self.tokens, self.shape.kv_heads, self.shape.group, x.shape[-1])
        return rows.transpose(1, 2).reshape(self.batch, self.rows, x.shape[-1])

    def scatter(self, rows: Tensor, out: Tensor) -> None:
        """The inverse of `gather`: write the rows of `out` [T, H, D] that stand for queries."""
        rows = rows.view(-1, self.shape.kv_heads, self.tokens, self.shape.group, rows.shape[-1])
        rows = rows.transpose(1, 2).reshape(-1, *out.shape[1:])
        out.index_copy_(0, self._scattered, rows.index_select(0, self._kept).to(out.dtype))

    def zero_padding(self, rows: Tensor) -> Tensor:
        """Zero the rows of [B, R, D] that stand for no query, before sums over rows."""
        shape = (-1, self.shape.kv_heads, self.tokens, self.shape.group, rows.shape[-1])
        return (rows.view(shape) * self.is_query[:, None, :, None, None]).view(rows.shape)

    def scores(self, q: Tensor, keys: Tensor) -> Tensor:
        """Products of [B, R, D] with [blocks, B, 64, D], -inf after a row's position.

        Returns [blocks, B, R, 64].
        """
        q = F.pad(q, (0, 0, 0, self.padding)) if self.padding else q
        products = q.new_empty(self.num_blocks, self.batch, q.shape[1], KEY_BLOCK)
        for block, out in zip(keys, products, strict=False):
            torch.bmm(q, block[: self.batch].transpose(1, 2), out=out)
        scores = products[:, :, : self.rows].contiguous()
        first = self._first_masked  # blocks before it hide nothing from anyone
        key = torch.arange(first * KEY_BLOCK, self.num_blocks * KEY_BLOCK).view(-1, 1, 1, KEY_BLOCK)
        future = key > self._positions[None, :, :, None]
        masked = scores[first:].view(
            -1, len(self._positions), self.shape.kv_heads, *scores.shape[2:]
        )
        masked.masked_fill_(future[:, :, None], float("-inf"))
        return scores

    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        """Block after block: [blocks, B, R, 64] with [blocks, B, 64, D] -> [B, R, D]."""
        if self.padding:
            weights = F.pad(weights, (0, 0, 0, self.padding))
        out = weights.new_zeros(self.batch, weights.shape[2], values.shape[-1])
        for block_weights, block in zip(weights, values, strict=False):
            out.baddbmm_(block_weights, block[: self.batch])
        return out[:, : self.rows]


def _chunks(layout: AttentionLayout, shape: _Shape, num_threads: int) -> list[_Chunk]:
    """Cut the sequences into chunks of bounded memory; which ones share a chunk has no effect."""
    key = (shape, num_threads)
    if key not in layout.plans:
        layout.plans[key] = [_Chunk(layout, s, shape) for s in _plan(layout, shape, num_threads)]
    chunks: list[_Chunk] = layout.plans[key]
    return chunks


def _plan(layout: AttentionLayout, shape: _Shape, num_threads: int) -> list[list[int]]:
    lens = list(zip(layout.query_lens, layout.key_lens, strict=True))
    order = sorted(range(len(lens)), key=lambda s: lens[s], reverse=True)
    key_floats = shape.kv_heads * (shape.dim + shape.value_dim)
    limit = max(1, min(CHUNK_FLOATS, sum(layout.key_lens) * key_floats // num_threads))
    chunks: list[list[int]] = []
    longest = 0
    for s in order:
        longest = max(longest, layout.key_lens[s])
        if not chunks or (len(chunks[-1]) + 1) * longest * key_floats > limit:
            chunks.append([])
            longest = layout.key_lens[s]
        chunks[-1].append(s)
    return chunks


def _work(layout: AttentionLayout, shape: _Shape) -> float:
    """Floating-point operations, padding included."""
    pairs = sum(
        max(q, ROW_MULTIPLE // shape.group) * k
        for q, k in zip(layout.query_lens, layout.key_lens, strict=True)
    )
    return 2.0 * pairs * shape.heads * (shape.dim + shape.value_dim)


def _forward_chunk(
    chunk: _Chunk, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor | None
) -> None:
    keys, values = chunk.gather_blocks(k), chunk.gather_blocks(v)
    for tile in chunk.tiles:
        weights = tile.scores(tile.gather(q) * scale, keys)
        largest = weights.amax((0, 3))
        weights.sub_(largest[None, :, :, None]).exp_()
        total = torch.zeros_like(largest)
        for block_sum in weights.sum(-1):
            total += block_sum
        tile.scatter(tile.weighted_sum(weights, values) / total[..., None], out)
        if lse is not None:
            tile.scatter((largest + total.log())[..., None], lse)


def _backward_chunk(
    chunk: _Chunk,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grad_out: Tensor,
    scale: float,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    q, k, v, out, lse = inputs
    grad_q, grad_k, grad_v = grads
    keys, values = chunk.gather_blocks(k), chunk.gather_blocks(v)
    grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
    for tile in chunk.tiles:
        b = tile.batch
        tile_q = tile.gather(q) * scale
        do = tile.zero_padding(tile.gather(grad_out))
        delta = (do * tile.gather(out)).sum(-1, keepdim=True)
        weights = tile.scores(tile_q, keys).sub_(tile.gather(lse)).exp_()
        # Rows of zeros, so that every product below has a shape that no other sequence decides.
        missing = -tile.rows % ROW_BLOCK
        tile_q, do, delta, weights = (
            F.pad(x, (0, 0, 0, missing)) for x in (tile_q, do, delta, weights)
        )
        dq = torch.zeros_like(tile_q)
        for j in range(tile.num_blocks):
            ds = weights[j] * (torch.bmm(do, values[j, :b].transpose(1, 2)) - delta)
            dq.baddbmm_(ds, keys[j, :b])
            for r in range(0, tile_q.shape[1], ROW_BLOCK):
                rows = slice(r, r + ROW_BLOCK)
                grad_values[j, :b].baddbmm_(weights[j][:, rows].transpose(1, 2), do[:, rows])
                grad_keys[j, :b].baddbmm_(ds[:, rows].transpose(1, 2), tile_q[:, rows])
        tile.scatter(dq[:, : tile.rows] * scale, grad_q)
    chunk.scatter_blocks(grad_keys, grad_k)
    chunk.scatter_blocks(grad_values, grad_v)


def blockwise_attention(
    pool: PiecePool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    scale: float,
    lse: Tensor | None = None,
) -> Tensor:
    """Row-invariant causal attention without autograd; see `Operators.attention`.

    `lse`, if given, is float32 [T, H, 1] and receives log sum_j exp(scale * q.k_j).
    """
    shape = _Shape(q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    out = q.new_empty(*q.shape[:2], shape.value_dim)
    chunks = _chunks(layout, shape, pool.num_threads)
    pieces = [partial(_forward_chunk, chunk, q, k, v, scale, out, lse) for chunk in chunks]
    pool.run(pieces, _work(layout, shape))
    return out


class AlignedAttention(torch.autograd.Function):
    """The forward above, and the usual flash-attention backward from its log-sum-exp.

    Its sums over query rows go through blocks of 64 that start at the sequence's own rows, so the
    gradients of a sequence depend on no other one either.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: AttentionLayout,
        scale: float,
        pool: PiecePool,
    ) -> Tensor:
        lse = q.new_empty(*q.shape[:2], 1, dtype=torch.float32)
        out = blockwise_attention(pool, q, k, v, layout, scale, lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale, ctx.pool = layout, scale, pool  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        layout: AttentionLayout = ctx.layout  # type: ignore[attr-defined]
        pool: PiecePool = ctx.pool  # type: ignore[attr-defined]
        scale: float = ctx.scale  # type: ignore[attr-defined]
        shape = _Shape(q.shape[1], k.shape[1], q.shape[2], v.shape[2])
        grads = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        chunks, inputs = _chunks(layout, shape, pool.num_threads), (q, k, v, out, lse)
        pieces = [partial(_backward_chunk, c, inputs, grad_out, scale, grads) for c in chunks]
        pool.run(pieces, 2.5 * _work(layout, shape))
        return (*grads, None, None, None)
