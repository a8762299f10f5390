"""Causal attention on a CPU, batched over sequences, with a fixed order of every sum.

A query row is one query token of one head. Keys are visited in chunks of 512 that start at absolute
positions 0, 512, ... of the sequence, and each chunk in blocks of 64. So the order of the sums over
keys depends only on the row's own position. For chunk c, and then over all chunks in ascending
order:

    m_c = max_j  q.k_j                    exact in any order
    p_j = exp(q.k_j - m_c), 0 for keys that the row does not see
    o_c = sum over blocks, in order, of p_block @ v_block;  the normaliser likewise

    m'  = max(m, m_c);  o = o exp(m - m') + o_c exp(m_c - m');  the normaliser likewise

(q.k_j stands for the whole score. A sink is the state before the first chunk, with a normaliser of
1.) Blocks and chunks that a row does not see add exact zeros, so it does not matter how long the
other sequences of the batch are, or whether such a chunk is visited. Rows are padded to a multiple
of 16, the size from which a single-threaded GEMM gives a row the same bits whatever rows surround
it (the self-check tries all of them). Prefill, chunked prefill with a cached prefix, decode and
training run this one function.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onpolicy.ops.cpu.attention_tiles import (
    KEY_BLOCK,
    ROW_MULTIPLE,
    Batch,
    Shape,
    Tile,
    batches_of,
    blocks_of,
    by_chunk,
    work,
)
from onpolicy.ops.cpu.gemms import FewSummed
from onpolicy.ops.cpu.layout import pad_rows
from onpolicy.ops.cpu.threads import PiecePool
from onpolicy.ops.differentiable_attention import Gradients
from onpolicy.ops.layouts import AttentionLayout, ScoreRule


def blockwise_attention(
    pool: PiecePool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    scores: ScoreRule,
    lse: Tensor | None = None,
) -> Tensor:
    """Compute row-invariant causal attention without autograd; see `Operators.attention`.

    `lse`, if given, is float32 [T, H, 1] and receives the log of every row's normaliser.
    """
    shape, inputs = _shape(q, k, v, scores), (q, k, v)
    out = q.new_empty(*q.shape[:2], shape.value_dim)
    flops = work(layout, shape)
    batches = batches_of(layout, shape, pool.threads_for(flops))
    pool.run([partial(_forward_batch, x, inputs, scores, out, lse) for x in batches], flops)
    return out


def attention_with_lse(
    pool: PiecePool, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scores: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Return `blockwise_attention` and the log of every row's normaliser, float32 [T, H]."""
    lse = q.new_empty(*q.shape[:2], dtype=torch.float32)
    return blockwise_attention(pool, q, k, v, layout, scores, lse[..., None]), lse


def attention_backward(
    pool: PiecePool,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: AttentionLayout,
    scores: ScoreRule,
) -> Gradients:
    """Return the gradients of q, k and v: the usual flash-attention backward pass from its log-sum-exp.

    Its sums over query rows go through blocks of 64 that start at the sequence's own rows, so the
    gradients of a sequence do not depend on any other sequence either.
    """
    shape = _shape(q, k, v, scores)
    grads = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    flops, inputs = 2.5 * work(layout, shape), (q, k, v, out, lse[..., None])
    batches = batches_of(layout, shape, pool.threads_for(flops))
    pieces = [partial(_backward_batch, x, inputs, grad_out, scores, grads) for x in batches]
    pool.run(pieces, flops)
    return grads


def _shape(q: Tensor, k: Tensor, v: Tensor, scores: ScoreRule) -> Shape:
    return Shape(q.shape[1], k.shape[1], q.shape[2], v.shape[2], scores.window)


def _forward_batch(
    batch: Batch,
    inputs: tuple[Tensor, Tensor, Tensor],
    scores: ScoreRule,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    (q, k, v), sinks = inputs, scores.sinks
    # Each tile keeps running sums over the chunks; spans are visited in ascending order.
    heads = batch.query_heads
    queries = [tile.gather(q[:, heads]).mul_(scores.scale) for tile in batch.tiles]
    sums: dict[Tile, Sums] = {}
    if sinks is not None:
        sums = {x: Sums.of_sink(x.of_heads(sinks[heads]), v.shape[-1]) for x in batch.tiles}
    for span in batch.spans:
        keys, values = batch.gather(k, span), batch.gather(v, span)
        for tile, rows in zip(batch.tiles, queries, strict=True):
            if tile.sees(span):
                for part in attend(tile, span, rows, keys, values, scores.softcap):
                    sums[tile] = sums[tile].with_next(part) if tile in sums else part
    for tile, done in sums.items():
        tile.scatter(done.mixed.div_(done.total[..., None]), out[:, heads])
        if lse is not None:
            tile.scatter((done.largest + done.total.log())[..., None], lse[:, heads])


@dataclass(frozen=True, slots=True)
class Sums:
    """The unnormalised softmax of each row over some of its keys."""

    largest: Tensor
    """[B, R]: the largest score."""

    total: Tensor
    """[B, R]: the sum of exp(score - largest)."""

    mixed: Tensor
    """[B, R, D]: the sum of exp(score - largest) * value."""

    @staticmethod
    def of_sink(sink: Tensor, dim: int) -> Sums:
        """Return the sums over one key with the score `sink` [B, R] and a value of zeros."""
        return Sums(sink, torch.ones_like(sink), sink.new_zeros(*sink.shape, dim))

    def with_next(self, other: Sums) -> Sums:
        """Return these sums merged with those over the next keys. Sums over no key change no bit."""
        largest = torch.maximum(self.largest, other.largest)
        kept = (self.largest - largest).exp_()
        added = (other.largest - largest).exp_()
        total = self.total * kept + other.total * added
        mixed = self.mixed.mul_(kept[..., None]).add_(other.mixed.mul_(added[..., None]))
        return Sums(largest, total, mixed)


def attend(
    tile: Tile, span: slice, q: Tensor, keys: Tensor, values: Tensor, softcap: float | None
) -> list[Sums]:
    """Return the sums of a tile's rows over each chunk of a span that some of them see.

    q: [B, R, D], scaled; keys, values: [sequences x key heads, keys of the span, D].
    """
    weights = tile.scores(q, tile.of(keys, span), softcap)
    largest = tile.largest(weights, span)
    tile.weigh_(weights, largest, span)
    total = torch.zeros_like(largest)
    for block_sum in by_chunk(weights).unflatten(-1, (-1, KEY_BLOCK)).sum(-1).unbind(-1):
        total += block_sum
    mixed = _weighted_sums(tile, weights, tile.of(values, span))
    parts = largest.unbind(-1), total.unbind(-1), mixed.unbind(1)
    return [Sums(*part) for part in zip(*parts, strict=True)]


def _weighted_sums(tile: Tile, weights: Tensor, values: Tensor) -> Tensor:
    """Sum weighted values block by block, per chunk: [B, R, keys], [B, keys, D] -> [B, C, R, D]."""
    rows = by_chunk(pad_rows(weights, ROW_MULTIPLE)).transpose(1, 2)
    count = rows.shape[1]
    rows = rows.flatten(0, 1)
    values = values.unflatten(1, (count, -1)).flatten(0, 1)
    out = rows.new_zeros(*rows.shape[:2], values.shape[-1])
    for block in blocks_of(values):
        out.baddbmm_(rows[..., block], values[:, block])
    by_tile: Tensor = out[:, : tile.rows].unflatten(0, (-1, count))
    return by_tile


ROW_BLOCK = 64
"""Number of query rows of one product in the backward pass, where the gradients of keys and values
sum over them; a tile's last block may be shorter, where padding rows of zeros would change no
bit."""

_few_summed = FewSummed(ROW_MULTIPLE, ROW_BLOCK)


def _backward_batch(
    batch: Batch,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grad_out: Tensor,
    scores: ScoreRule,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    heads = batch.query_heads
    q, out, lse, grad = (x[:, heads] for x in (inputs[0], *inputs[3:], grad_out))
    _, k, v, _, _ = inputs
    grad_q, grad_k, grad_v = grads
    tiles = [_Rows.of(tile, q, grad, out, lse, scores) for tile in batch.tiles]
    # Key gradients sum over the tiles in order, within a buffer for the span.
    for span in batch.spans:
        keys, values = batch.gather(k, span), batch.gather(v, span)
        grad_keys, grad_values = (
            x.new_zeros(span.stop - span.start, len(x), KEY_BLOCK, x.shape[-1])
            for x in (keys, values)
        )
        for rows in tiles:
            seen = rows.tile.seen(span)
            for j in range(seen.start, seen.stop):
                block, b = slice(j, j + 1), rows.tile.batch
                ins = rows.tile.of(keys, span, block), rows.tile.of(values, span, block)
                outs = grad_keys[j - span.start, :b], grad_values[j - span.start, :b]
                _backward_block(rows, block, *ins, scores, *outs)
        batch.scatter(grad_keys, span, grad_k)
        batch.scatter(grad_values, span, grad_v)
    for rows in tiles:
        rows.tile.scatter(rows.grad_q[:, : rows.tile.rows].mul_(scores.scale), grad_q[:, heads])


def _backward_block(
    rows: _Rows,
    block: slice,
    keys: Tensor,
    values: Tensor,
    scores: ScoreRule,
    grad_keys: Tensor,
    grad_values: Tensor,
) -> None:
    """Add the gradients of a tile's queries, and of one block of keys and values, each [B, 64, D]."""
    tile = rows.tile
    weights = tile.scores(rows.q[:, : tile.rows], keys, scores.softcap)
    slopes = _slopes(weights, scores.softcap)
    weights = rows.padded(tile.weigh_(weights, rows.lse, block))
    ds = torch.bmm(rows.grad, values.transpose(1, 2)).sub_(rows.delta).mul_(weights)
    if scores.softcap:
        ds.mul_(rows.padded(slopes))
    rows.grad_q.baddbmm_(ds, keys)
    for r in range(0, weights.shape[1], ROW_BLOCK):
        part = slice(r, r + ROW_BLOCK)
        grad_values.baddbmm_(weights[:, part].transpose(1, 2), rows.grad[:, part])
        grad_keys.baddbmm_(ds[:, part].transpose(1, 2), rows.q[:, part])


def _slopes(scores: Tensor, softcap: float | None) -> Tensor:
    """Return d capped / d uncapped = 1 - (capped / softcap)^2, or [..., 0] if not capped."""
    return 1 - (scores / softcap).square_() if softcap else scores[..., :0]


@dataclass(slots=True)
class _Rows:
    """A tile's rows in the backward pass, each [B, R, ...], padded for the sums over rows.

    So no other sequence of the batch changes a bit of the products.
    """

    tile: Tile
    q: Tensor
    grad: Tensor
    delta: Tensor
    lse: Tensor
    grad_q: Tensor

    @staticmethod
    def of(
        tile: Tile, q: Tensor, grad: Tensor, out: Tensor, lse: Tensor, scores: ScoreRule
    ) -> _Rows:
        grad = tile.zero_padding_(tile.gather(grad))
        delta = (grad * tile.gather(out)).sum(-1, keepdim=True)
        multiple = _few_summed.multiple(KEY_BLOCK, q.shape[-1], out.shape[-1])
        q, grad, delta = (
            pad_rows(x, multiple) for x in (tile.gather(q).mul_(scores.scale), grad, delta)
        )
        return _Rows(tile, q, grad, delta, tile.gather(lse), torch.zeros_like(q))

    def padded(self, rows: Tensor) -> Tensor:
        """Pad [B, rows of the tile, ...] to as many rows as these have."""
        return pad_rows(rows, self.q.shape[1])
