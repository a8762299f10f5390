"""Which query rows and which keys of a layout make one batch of matrix products on a CPU.

A chunk is some sequences with the keys that their queries see, a tile some query tokens of each of
them. Keys lie in blocks of 64 that start at absolute positions 0, 64, ... of the sequence. With a window
a sequence's blocks begin with the first that any of its queries sees, and a tile's likewise, so work
grows with the window, not with what lies before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.ops.layouts import AttentionLayout

KEY_BLOCK = 64
ROW_MULTIPLE = 16
MAX_ROWS = 256

PADDED_ROWS = 64
"""From so many rows on a tile keeps its padding: to cut it off would cost more than to compute it."""

CHUNK_FLOATS = 1 << 22
"""Upper bound for the gathered keys of one chunk of sequences (16 MiB), unless one is larger."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one call. H_kv groups of G query heads share a key head."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    window: int | None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


class Chunk:
    """Some sequences of a layout, longest queries first, and the tiles of query rows to compute.

    Holds indices only, so that all layers of a forward pass share it.
    """

    def __init__(self, layout: AttentionLayout, sequences: Sequence[int], shape: Shape):
        self.shape = shape
        chosen = torch.tensor(sequences)
        query_lens = torch.tensor(layout.query_lens)[chosen]
        key_lens = torch.tensor(layout.key_lens)[chosen]
        query_starts = torch.tensor([0, *layout.query_lens]).cumsum(0)[chosen]
        first_keys = _first_blocks(key_lens - query_lens, shape.window) * KEY_BLOCK
        key_lens = key_lens - first_keys  # from here on positions count from there
        self.num_blocks = -(-int(key_lens.max()) // KEY_BLOCK)
        # Padding repeats the sequence's last key: its weight is 0, and 0 times another sequence's
        # value would not be 0 if that were not finite.
        slots = torch.arange(self.num_blocks * KEY_BLOCK)
        self._kept = (slots < key_lens[:, None]).reshape(-1).nonzero()[:, 0]
        slots = first_keys[:, None] + torch.minimum(slots, key_lens[:, None] - 1)
        rows = layout.key_rows[chosen[:, None], slots]
        self._scattered = rows.reshape(-1)[self._kept]
        rows = rows.view(-1, self.num_blocks, 1, KEY_BLOCK).transpose(0, 1)
        heads = torch.arange(shape.kv_heads).view(1, 1, -1, 1)
        self._gathered = (rows * shape.kv_heads + heads).reshape(-1)
        longest = int(query_lens[0])
        step = max(1, min(longest, KEY_BLOCK, MAX_ROWS // shape.group))
        self.tiles = [
            Tile(shape, first, min(step, longest - first), query_lens, query_starts, key_lens)
            for first in range(0, longest, step)
        ]

    def gather_blocks(self, store: Tensor) -> Tensor:
        """Rows of the key or value store as float32 [blocks, B, 64, D]; B: sequence x key head."""
        blocks = store.view(-1, store.shape[-1]).index_select(0, self._gathered).float()
        return blocks.view(self.num_blocks, -1, KEY_BLOCK, store.shape[-1])

    def scatter_blocks(self, blocks: Tensor, store: Tensor) -> None:
        """The inverse of `gather_blocks`, for gradients: write every key's row of `store`."""
        by_key = blocks.view(self.num_blocks, -1, self.shape.kv_heads, KEY_BLOCK, blocks.shape[-1])
        by_key = by_key.permute(1, 0, 3, 2, 4).reshape(-1, *store.shape[1:])
        kept = by_key.index_select(0, self._kept)
        store.index_copy_(0, self._scattered, kept.to(store.dtype))


class Tile:
    """Up to 64 consecutive query tokens, or 256 // G, of every sequence of a chunk that has so many.

    Together B = (sequences x key heads) matrices of R = (tokens x G) rows, padded for the GEMMs. More
    tokens would make more blocks of keys of which only some of the rows see a part.
    """

    def __init__(
        self,
        shape: Shape,
        first: int,
        tokens: int,
        query_lens: Tensor,
        query_starts: Tensor,
        key_lens: Tensor,
    ):
        self.shape, self.tokens = shape, tokens
        count = int((query_lens > first).sum())
        self.batch = count * shape.kv_heads
        self.queries = tokens * shape.group
        self.rows = self.queries
        if self.queries >= PADDED_ROWS:
            self.rows += -self.queries % ROW_MULTIPLE
        lens, starts, keys = (x[:count, None] for x in (query_lens, query_starts, key_lens))
        slots = first + torch.arange(tokens)
        self.is_query = slots < lens
        self._is_full = bool(self.is_query.all())
        slots = torch.minimum(slots, lens - 1)  # padding repeats the sequence's last query
        self._gathered = (starts + slots).reshape(-1)
        start = int(self._gathered[0])
        self._run = slice(start, start + tokens) if count == 1 else None
        self._heads = shape.kv_heads, shape.group
        self._kept = self.is_query.reshape(-1).nonzero()[:, 0]
        self._scattered = self._gathered[self._kept]
        positions = (keys - lens + slots).repeat_interleave(shape.group, dim=1)
        last = positions[:, -1:].expand(-1, self.rows - self.queries)
        self._positions = torch.cat([positions, last], dim=1)
        # Blocks before `first` nobody sees; those before `first_masked` hide nothing from anyone.
        first = int(_first_blocks(self._positions, shape.window).min())
        self._first_masked = first if shape.window else int(self._positions.min()) // KEY_BLOCK
        self.blocks = slice(first, int(self._positions.max()) // KEY_BLOCK + 1)

    def gather(self, x: Tensor) -> Tensor:
        """Rows of [T, H, D] as float32 [B, R, D]."""
        taken = x[self._run] if self._run else x.index_select(0, self._gathered)
        rows = torch.empty(self.batch, self.rows, x.shape[-1], dtype=torch.float32)
        rows[:, self.queries :] = 0
        self._by_query(rows).copy_(taken.view(-1, self.tokens, *self._heads, x.shape[-1]))
        return rows

    def scatter(self, rows: Tensor, out: Tensor) -> None:
        """The inverse of `gather`: write the rows of `out` [T, H, D] that stand for queries."""
        by_query = self._by_query(rows)
        if self._run:
            out[self._run].view(by_query.shape).copy_(by_query)
            return
        taken = by_query.reshape(-1, *out.shape[1:])
        if not self._is_full:
            taken = taken.index_select(0, self._kept)
        out.index_copy_(0, self._scattered, taken.to(out.dtype))

    def _by_query(self, rows: Tensor) -> Tensor:
        """A view of [B, R, D]: [sequences, tokens, key heads, G, D]."""
        by_head = rows[:, : self.queries].unflatten(0, (-1, self.shape.kv_heads))
        by_query: Tensor = by_head.unflatten(2, (self.tokens, self.shape.group)).transpose(1, 2)
        return by_query

    def of_heads(self, x: Tensor) -> Tensor:
        """A number for each head, [H], as float32 [B, R]."""
        by_group = x.float().view(1, self.shape.kv_heads, 1, self.shape.group)
        by_row = by_group.expand(len(self._positions), -1, self.tokens, -1)
        return F.pad(by_row.reshape(-1, self.queries), (0, self.rows - self.queries))

    def zero_padding_(self, rows: Tensor) -> Tensor:
        """Zero the rows of [B, R, D] that stand for no query, before sums over rows."""
        if not self._is_full:
            self._by_query(rows).mul_(self.is_query[:, :, None, None, None])
        return rows

    def scores(self, q: Tensor, keys: Tensor, softcap: float | None) -> Tensor:
        """Products of [B, R, D] with [blocks, B, 64, D], capped, also with keys that a row cannot see.

        Returns [blocks of the tile, B, R, 64].
        """
        q = self._padded(q)
        keys = keys[self.blocks, : self.batch]
        products = q.new_empty(*keys.shape[:2], q.shape[1], KEY_BLOCK)
        for block, out in zip(keys, products, strict=True):
            torch.bmm(q, block.transpose(1, 2), out=out)
        scores = products[:, :, : self.rows].contiguous()
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        return scores

    def largest(self, scores: Tensor) -> Tensor:
        """The largest score of each row, of the keys that it sees: [B, R]."""
        bounds = (self._visible - 0.5) * float("inf")
        largest = torch.minimum(self._masked(scores), bounds).amax(-1).amax(0).view(-1, self.rows)
        if unmasked := self._first_masked - self.blocks.start:
            largest = torch.maximum(largest, scores[:unmasked].amax(-1).amax(0))
        return largest

    def weigh_(self, scores: Tensor, subtrahend: Tensor) -> Tensor:
        """`exp(scores - subtrahend)` in place, 0 for keys that a row cannot see; subtrahend: [B, R, 1],
        no less than the largest score.

        What cannot be seen is exponentiated as 0 and multiplied by 0: of -inf a library's exp takes
        up to 25 times as long.
        """
        masked = self._masked(scores.sub_(subtrahend)).clamp_(max=0)
        scores.exp_()
        masked.mul_(self._visible)
        return scores

    def _masked(self, scores: Tensor) -> Tensor:
        """Blocks of which some row sees a part: [blocks, sequences, key heads, R, 64]."""
        masked = scores[self._first_masked - self.blocks.start :]
        return masked.view(-1, len(self._positions), self.shape.kv_heads, *scores.shape[2:])

    @cached_property
    def _visible(self) -> Tensor:
        """1.0 for keys of the masked blocks that a row sees, else 0.0: [blocks, sequences, 1, R, 64].

        Computed once for all layers, which share the tile.
        """
        key = torch.arange(self._first_masked * KEY_BLOCK, self.blocks.stop * KEY_BLOCK)
        key, position = (
            key.float().view(-1, 1, 1, 1, KEY_BLOCK),
            self._positions[:, None, :, None].float(),
        )
        visible = torch.empty(len(key), *position.shape[:-1], KEY_BLOCK)
        torch.le(key, position, out=visible)  # several times as fast as booleans, and exact
        if self.shape.window:
            visible.mul_(key > position - self.shape.window)
        return visible

    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        """Block after block: `scores`' shape with [blocks, B, 64, D] -> [B, R, D]."""
        weights = self._padded(weights)
        out = weights.new_zeros(self.batch, weights.shape[2], values.shape[-1])
        for block_weights, block in zip(weights, values[self.blocks, : self.batch], strict=True):
            out.baddbmm_(block_weights, block)
        return out[:, : self.rows]

    def _padded(self, rows: Tensor) -> Tensor:
        """[..., R, D] with a multiple of 16 rows."""
        missing = -self.rows % ROW_MULTIPLE
        return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def chunks_of(layout: AttentionLayout, shape: Shape, num_threads: int) -> list[Chunk]:
    """Cut the sequences into chunks of bounded memory; which ones share a chunk has no effect."""
    key = (shape, num_threads)
    if key not in layout.plans:
        layout.plans[key] = [Chunk(layout, s, shape) for s in _plan(layout, shape, num_threads)]
    chunks: list[Chunk] = layout.plans[key]
    return chunks


def _plan(layout: AttentionLayout, shape: Shape, num_threads: int) -> list[list[int]]:
    lens = _lens(layout, shape)
    order = sorted(range(len(lens)), key=lambda s: lens[s], reverse=True)
    key_floats = shape.kv_heads * (shape.dim + shape.value_dim)
    limit = max(1, min(CHUNK_FLOATS, sum(keys for _, keys in lens) * key_floats // num_threads))
    chunks: list[list[int]] = []
    longest = 0
    for s in order:
        longest = max(longest, lens[s][1])
        if not chunks or (len(chunks[-1]) + 1) * longest * key_floats > limit:
            chunks.append([])
            longest = lens[s][1]
        chunks[-1].append(s)
    return chunks


def work(layout: AttentionLayout, shape: Shape) -> float:
    """Floating-point operations, padding included."""
    seen = shape.window or float("inf")
    pairs = sum(max(q, ROW_MULTIPLE // shape.group) * min(k, seen) for q, k in _lens(layout, shape))
    return 2.0 * pairs * shape.heads * (shape.dim + shape.value_dim)


def _lens(layout: AttentionLayout, shape: Shape) -> list[tuple[int, int]]:
    """Of every sequence: its queries, and its keys from the first block on that any of them sees."""
    lens = torch.tensor([layout.query_lens, layout.key_lens])
    lens[1] -= _first_blocks(lens[1] - lens[0], shape.window) * KEY_BLOCK
    return list(zip(*lens.tolist(), strict=True))


def _first_blocks(positions: Tensor, window: int | None) -> Tensor:
    """The first block of which queries at `positions` see a key."""
    if not window:
        return torch.zeros_like(positions)
    return (positions - window + 1).clamp(min=0) // KEY_BLOCK
