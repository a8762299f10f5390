"""Causal attention on a CPU, batched over sequences, with a fixed order of every sum.

A query row is one query token of one head. Keys are visited in blocks of 64 that start at absolute
positions 0, 64, ... of the sequence, so the order of the sums over keys depends on the row's own
position and on nothing else:

    m   = max_j  q.k_j                    exact in any order
    p_j = exp(q.k_j - m), 0 for keys that the row does not see
    o   = sum over blocks, in order, of p_block @ v_block;  the normaliser likewise

(q.k_j stands for the whole score; a sink is one more in m, and the normaliser's first term.) Blocks of
which a row sees nothing add exact zeros, so it does not matter how long the other sequences of the
batch are, or whether such a block is visited. Rows are padded to a multiple of 16, the size from which a
single-threaded GEMM gives a row the same bits whatever rows surround it (the self-check tries all
of them). Prefill, chunked prefill with a cached prefix, decode and training run this one function.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.cpu.attention_tiles import Chunk, Shape, chunks_of, work
from onpolicy.ops.cpu.elementwise import whole_vectors
from onpolicy.ops.cpu.threads import PiecePool
from onpolicy.ops.layouts import AttentionLayout, Scores
from onpolicy.ops.sinks import sink_gradient

ROW_BLOCK = 64
"""Query rows of one product in the backward pass, where keys and values sum over them."""


def _forward_chunk(
    chunk: Chunk,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    scores: Scores,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    q, k, v, sinks = inputs
    keys, values = chunk.gather_blocks(k), chunk.gather_blocks(v)
    for tile in chunk.tiles:
        weights = tile.scores(tile.gather(q).mul_(scores.scale), keys, scores.softcap)
        largest = tile.largest(weights)
        total = torch.zeros_like(largest)
        if sinks is not None:
            sink = tile.of_heads(sinks)
            largest = torch.maximum(largest, sink)
            total = whole_vectors(torch.exp, sink - largest)
        weights = tile.weigh_(weights, largest[..., None])
        for block_sum in weights.sum(-1):
            total += block_sum
        tile.scatter(tile.weighted_sum(weights, values).div_(total[..., None]), out)
        if lse is not None:
            tile.scatter((largest + total.log())[..., None], lse)


def _backward_chunk(
    chunk: Chunk,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grad_out: Tensor,
    scores: Scores,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    q, k, v, out, lse = inputs
    grad_q, grad_k, grad_v = grads
    keys, values = chunk.gather_blocks(k), chunk.gather_blocks(v)
    grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
    for tile in chunk.tiles:
        seen = tile.blocks, slice(tile.batch)
        tile_q = tile.gather(q).mul_(scores.scale)
        do = tile.zero_padding_(tile.gather(grad_out))
        delta = (do * tile.gather(out)).sum(-1, keepdim=True)
        weights = tile.scores(tile_q, keys, scores.softcap)
        slopes = _slopes(weights, scores.softcap)
        weights = tile.weigh_(weights, tile.gather(lse))
        # Rows of zeros, so that every product below has a shape that no other sequence decides.
        if missing := -tile.rows % ROW_BLOCK:
            tile_q, do, delta, weights, slopes = (
                F.pad(x, (0, 0, 0, missing)) for x in (tile_q, do, delta, weights, slopes)
            )
        dq = torch.zeros_like(tile_q)
        blocks = zip(
            weights, keys[seen], values[seen], grad_keys[seen], grad_values[seen], strict=True
        )
        for j, (weight, key, value, grad_key, grad_value) in enumerate(blocks):
            ds = torch.bmm(do, value.transpose(1, 2)).sub_(delta).mul_(weight)
            if scores.softcap:
                ds.mul_(slopes[j])
            dq.baddbmm_(ds, key)
            for r in range(0, tile_q.shape[1], ROW_BLOCK):
                rows = slice(r, r + ROW_BLOCK)
                grad_value.baddbmm_(weight[:, rows].transpose(1, 2), do[:, rows])
                grad_key.baddbmm_(ds[:, rows].transpose(1, 2), tile_q[:, rows])
        tile.scatter(dq[:, : tile.rows].mul_(scores.scale), grad_q)
    chunk.scatter_blocks(grad_keys, grad_k)
    chunk.scatter_blocks(grad_values, grad_v)


def _slopes(scores: Tensor, softcap: float | None) -> Tensor:
    """d capped / d uncapped = 1 - (capped / softcap)^2, [..., 0] if not capped."""
    return 1 - (scores / softcap).square_() if softcap else scores[..., :0]


def _shape(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Shape:
    return Shape(q.shape[1], k.shape[1], q.shape[2], v.shape[2], scores.window)


def blockwise_attention(
    pool: PiecePool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    layout: AttentionLayout,
    scores: Scores,
    lse: Tensor | None = None,
) -> Tensor:
    """Row-invariant causal attention without autograd; see `Operators.attention`.

    `lse`, if given, is float32 [T, H, 1] and receives the log of every row's normaliser.
    """
    shape, inputs = _shape(q, k, v, scores), (q, k, v, sinks)
    out = q.new_empty(*q.shape[:2], shape.value_dim)
    chunks = chunks_of(layout, shape, pool.num_threads)
    pieces = [partial(_forward_chunk, chunk, inputs, scores, out, lse) for chunk in chunks]
    pool.run(pieces, work(layout, shape))
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
        sinks: Tensor | None,
        layout: AttentionLayout,
        scores: Scores,
        pool: PiecePool,
    ) -> Tensor:
        lse = q.new_empty(*q.shape[:2], 1, dtype=torch.float32)
        out = blockwise_attention(pool, q, k, v, sinks, layout, scores, lse)
        ctx.save_for_backward(q, k, v, sinks, out, lse)  # type: ignore[arg-type]
        ctx.layout, ctx.scores, ctx.pool = layout, scores, pool  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        layout: AttentionLayout = ctx.layout  # type: ignore[attr-defined]
        pool: PiecePool = ctx.pool  # type: ignore[attr-defined]
        scores: Scores = ctx.scores  # type: ignore[attr-defined]
        shape = _shape(q, k, v, scores)
        grads = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        chunks, inputs = chunks_of(layout, shape, pool.num_threads), (q, k, v, out, lse)
        pieces = [partial(_backward_chunk, c, inputs, grad_out, scores, grads) for c in chunks]
        pool.run(pieces, 2.5 * work(layout, shape))
        return (*grads, sink_gradient(sinks, grad_out, out, lse[..., 0]), None, None, None)
