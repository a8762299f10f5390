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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.base import AttentionLayout
from onpolicy.ops.cpu.threads import PiecePool

KEY_BLOCK = 64
ROW_MULTIPLE = 16
MAX_ROWS = 256
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

    A tile is up to 256 // G consecutive query tokens of every sequence of the chunk at once:
    B = (sequences x key heads) matrices of R = (tokens x G, padded) rows.
    """

    def __init__(self, layout: AttentionLayout, sequences: Sequence[int], shape: _Shape):
        self.layout, self.shape = layout, shape
        self.sequences = torch.tensor(sequences)
        starts = torch.tensor([0, *layout.query_lens]).cumsum(0)
        self.query_starts = starts[self.sequences]
        self.query_lens = torch.tensor(layout.query_lens)[self.sequences]
        self.key_lens = torch.tensor(layout.key_lens)[self.sequences]
        self.num_blocks = -(-int(self.key_lens.max()) // KEY_BLOCK)
        self.tile_tokens = max(1, min(int(self.query_lens[0]), MAX_ROWS // shape.group))
        self.tile_rows = -(-self.tile_tokens * shape.group // ROW_MULTIPLE) * ROW_MULTIPLE

    def gather_blocks(self, store: Tensor) -> Tensor:
        """Rows of the key or value store as float32 [blocks, B, 64, D]."""
        rows = self.layout.key_rows[self.sequences, : self.num_blocks * KEY_BLOCK]
        rows = F.pad(rows, (0, self.num_blocks * KEY_BLOCK - rows.shape[1]))
        rows = rows.view(-1, self.num_blocks, 1, KEY_BLOCK).transpose(0, 1)
        heads = torch.arange(self.shape.kv_heads).view(1, 1, -1, 1)
        flat = (rows * self.shape.kv_heads + heads).reshape(-1)
        blocks = store.view(-1, store.shape[-1]).index_select(0, flat).float()
        return blocks.view(self.num_blocks, -1, KEY_BLOCK, store.shape[-1])

    def scatter_blocks(self, blocks: Tensor, store: Tensor) -> None:
        """The inverse of `gather_blocks`, for gradients: write every key's row of `store`."""
        per_key = blocks.view(
            self.num_blocks, -1, self.shape.kv_heads, KEY_BLOCK, blocks.shape[-1]
        ).permute(1, 0, 3, 2, 4)
        per_key = per_key.reshape(len(self.sequences), -1, *store.shape[1:])
        valid = torch.arange(per_key.shape[1]) < self.key_lens[:, None]
        rows = self.layout.key_rows[self.sequences, : self.num_blocks * KEY_BLOCK]
        store[rows[valid[:, : rows.shape[1]]]] = per_key[valid].to(store.dtype)

    def tiles(self) -> Iterator[_Tile]:
        for first in range(0, int(self.query_lens[0]), self.tile_tokens):
            yield _Tile(self, first)


class _Tile:
    """Query tokens first .. first + tile_tokens of each sequence that has so many."""

    def __init__(self, chunk: _Chunk, first: int):
        self.shape, self.rows, self.tokens = chunk.shape, chunk.tile_rows, chunk.tile_tokens
        count = int((chunk.query_lens > first).sum())
        lens, starts = chunk.query_lens[:count, None], chunk.query_starts[:count, None]
        slots = first + torch.arange(self.tokens)
        self.batch = count * chunk.shape.kv_heads
        self.valid = slots < lens
        self.query_rows = starts + torch.minimum(slots, lens - 1)
        self.positions = chunk.key_lens[:count, None] - lens + torch.minimum(slots, lens - 1)
        self.num_blocks = int(self.positions.max()) // KEY_BLOCK + 1

    def gather(self, x: Tensor) -> Tensor:
        """Rows of [T, H, D] as float32 [B, R, D]; padding repeats the sequence's last row."""
        tile = x[self.query_rows].float()
        tile = tile.view(-1, self.tokens, self.shape.kv_heads, self.shape.group, x.shape[-1])
        tile = tile.transpose(1, 2).reshape(self.batch, -1, x.shape[-1])
        return F.pad(tile, (0, 0, 0, self.rows - tile.shape[1]))

    def scatter(self, tile: Tensor, out: Tensor) -> None:
        """The inverse of `gather`: write the valid rows of `out` [T, H, D]."""
        tile = tile[:, : self.tokens * self.shape.group]
        tile = tile.view(-1, self.shape.kv_heads, self.tokens, self.shape.group, tile.shape[-1])
        tile = tile.transpose(1, 2).reshape(-1, self.tokens, *out.shape[1:])
        out[self.query_rows[self.valid]] = tile[self.valid].to(out.dtype)

    def zero_padding(self, tile: Tensor) -> Tensor:
        """Zero the rows of [B, R, D] that stand for no query token, before summing over rows."""
        tokens = self.valid[:, None, :, None].expand(-1, self.shape.kv_heads, -1, self.shape.group)
        rows = F.pad(tokens.reshape(self.batch, -1), (0, self.rows - self.tokens * self.shape.group))
        return tile * rows[..., None]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Masked products of [B, R, D] with blocks [blocks, B, 64, D]: [blocks, B, R, 64]."""
        scores = q.new_empty(self.num_blocks, self.batch, self.rows, KEY_BLOCK)
        for j in range(self.num_blocks):
            torch.bmm(q, k[j, : self.batch].transpose(1, 2), out=scores[j])
        self._mask(scores)
        return scores

    def _mask(self, scores: Tensor) -> None:
        """Set to -inf what lies after a row's own position; a padded row always sees some key."""
        positions = self.positions.repeat_interleave(self.shape.group, dim=1)
        positions = F.pad(positions, (0, self.rows - positions.shape[1]))
        first = int(self.positions.min()) // KEY_BLOCK  # blocks before it hide nothing from anyone
        keys = torch.arange(first * KEY_BLOCK, self.num_blocks * KEY_BLOCK).view(-1, 1, 1, KEY_BLOCK)
        future = keys > positions[None, :, :, None]
        view = scores[first:].view(-1, len(positions), self.shape.kv_heads, self.rows, KEY_BLOCK)
        view.masked_fill_(future[:, :, None], float("-inf"))


def _plan(layout: AttentionLayout, shape: _Shape, num_threads: int) -> list[list[int]]:
    """Cut the sequences into chunks of bounded memory; which ones share a chunk has no effect."""
    order = sorted(
        range(len(layout.query_lens)), key=lambda s: (-layout.query_lens[s], -layout.key_lens[s])
    )
    key_floats = shape.kv_heads * (shape.dim + shape.value_dim)
    limit = max(1, min(CHUNK_FLOATS, sum(layout.key_lens) * key_floats // num_threads))
    chunks: list[list[int]] = []
    longest = 0
    for s in order:
        longest = max(longest, layout.key_lens[s]) if chunks else layout.key_lens[s]
        if not chunks or (len(chunks[-1]) + 1) * longest * key_floats > limit:
            chunks.append([])
            longest = layout.key_lens[s]
        chunks[-1].append(s)
    return chunks


def _flops(layout: AttentionLayout, shape: _Shape) -> float:
    pairs = sum(q * k for q, k in zip(layout.query_lens, layout.key_lens, strict=True))
    return 2.0 * pairs * shape.heads * (shape.dim + shape.value_dim)


def _forward_chunk(
    chunk: _Chunk, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor | None
) -> None:
    keys, values = chunk.gather_blocks(k), chunk.gather_blocks(v)
    for tile in chunk.tiles():
        p = tile.scores(tile.gather(q) * scale, keys)
        largest = p.amax((0, 3))
        p.sub_(largest[None, :, :, None]).exp_()
        block_sums = p.sum(-1)
        total = torch.zeros_like(largest)
        o = p.new_zeros(tile.batch, tile.rows, values.shape[-1])
        for j in range(tile.num_blocks):
            o.baddbmm_(p[j], values[j, : tile.batch])
            total += block_sums[j]
        tile.scatter(o / total[..., None], out)
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
    for tile in chunk.tiles():
        b = tile.batch
        tile_q, tile_lse = tile.gather(q) * scale, tile.gather(lse)
        do = tile.zero_padding(tile.gather(grad_out))
        delta = (do * tile.gather(out)).sum(-1, keepdim=True)
        p = tile.scores(tile_q, keys).sub_(tile_lse).exp_()
        dq = torch.zeros_like(tile_q)
        for j in range(tile.num_blocks):
            grad_values[j, :b].baddbmm_(p[j].transpose(1, 2), do)
            dp = torch.bmm(do, values[j, :b].transpose(1, 2))
            ds = p[j] * (dp - delta)
            dq.baddbmm_(ds, keys[j, :b])
            grad_keys[j, :b].baddbmm_(ds.transpose(1, 2), tile_q)
        tile.scatter(dq * scale, grad_q)
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
    chunks = [_Chunk(layout, s, shape) for s in _plan(layout, shape, pool.num_threads)]
    pieces = [lambda c=c: _forward_chunk(c, q, k, v, scale, out, lse) for c in chunks]
    pool.run(pieces, _flops(layout, shape))
    return out


class AlignedAttention(torch.autograd.Function):
    """The forward above, and the usual flash-attention backward from its log-sum-exp."""

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
        chunks = [_Chunk(layout, s, shape) for s in _plan(layout, shape, pool.num_threads)]
        inputs = (q, k, v, out, lse)
        pieces = [lambda c=c: _backward_chunk(c, inputs, grad_out, scale, grads) for c in chunks]
        pool.run(pieces, 2.5 * _flops(layout, shape))
        return (*grads, None, None, None)
