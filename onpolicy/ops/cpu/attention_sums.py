"""The softmax of query rows over a chunk of keys, and the merging of chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onpolicy.ops.cpu.attention_tiles import KEY_BLOCK, Tile, blocks_of, by_chunk


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
    rows = by_chunk(tile.padded(weights)).transpose(1, 2)
    count = rows.shape[1]
    rows = rows.flatten(0, 1)
    values = values.unflatten(1, (count, -1)).flatten(0, 1)
    out = rows.new_zeros(*rows.shape[:2], values.shape[-1])
    for block in blocks_of(values):
        out.baddbmm_(rows[..., block], values[:, block])
    by_tile: Tensor = out[:, : tile.rows].unflatten(0, (-1, count))
    return by_tile
