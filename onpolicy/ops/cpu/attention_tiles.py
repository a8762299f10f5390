"""Batches of attention's matrix products on a CPU, and their tiles of query rows.

A batch is some sequences with some of the key heads and the keys that their queries see; its tiles
are blocks of query tokens of these sequences. Threads share the batches: if there are fewer
sequences than threads, each thread takes some of a sequence's heads.

Chunks of keys, and blocks within them, start at multiples of their sizes, counted from a sequence's
first token. With a window, a tile's blocks begin with the first block in which any of its queries
sees a key, and a batch's positions count from the first chunk in which one does, so work grows with
the window, not with the keys before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.contract import ATTENTION_CHUNK
from onpolicy.ops.cpu.layout import pad_rows
from onpolicy.ops.layouts import AttentionLayout

KEY_CHUNK = ATTENTION_CHUNK

KEY_BLOCK = 64
"""Number of keys of one product with values; a chunk's sum goes through its blocks in order, so
this decides bits."""

ROW_MULTIPLE = 16
"""The number of rows from which a single-threaded GEMM gives a row the same bits whatever rows
surround it."""

MAX_ROWS = 256

PADDED_ROWS = 64
"""Number of rows from which a tile keeps its padding: slicing it off would cost more than computing
it."""

LEAST = torch.finfo(torch.float32).min
"""Largest score of a row that sees no key: less than any other score, and finite."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one call. G = H / H_kv query heads share a key head."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    window: int | None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def key_floats(self) -> int:
        """Return the number of elements of one token's keys and values."""
        return self.kv_heads * (self.dim + self.value_dim)


def first_seen(positions: Tensor, window: int | None, size: int) -> Tensor:
    """Return the start of the first run of `size` keys of which queries at `positions` see one."""
    if not window:
        return torch.zeros_like(positions)
    return (positions - window + 1).clamp(min=0) // size * size


class Tile:
    """Up to 64 consecutive query tokens, or 256 // G, of every sequence of a batch that has them.

    Together they are B = (sequences x key heads) matrices of R = (tokens x G) rows, padded for the
    GEMMs. With more tokens, more blocks of keys would be visible to only some of the rows.
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
        # No row sees blocks before `first`; every row sees all keys of blocks before `first_masked`.
        first = int(first_seen(self._positions, shape.window, KEY_BLOCK).min()) // KEY_BLOCK
        self._first_masked = first if shape.window else int(self._positions.min()) // KEY_BLOCK
        self.blocks = slice(first, int(self._positions.max()) // KEY_BLOCK + 1)

    def gather(self, x: Tensor) -> Tensor:
        """Gather rows of [T, H, D] as float32 [B, R, D]."""
        taken = x[self._run] if self._run else x.index_select(0, self._gathered)
        rows = torch.empty(self.batch, self.rows, x.shape[-1], dtype=torch.float32)
        rows[:, self.queries :] = 0
        self._by_query(rows).copy_(taken.view(-1, self.tokens, *self._heads, x.shape[-1]))
        return rows

    def scatter(self, rows: Tensor, out: Tensor) -> None:
        """Write the rows that stand for queries to `out` [T, H, D]: the inverse of `gather`."""
        by_query = self._by_query(rows)
        if self._run:
            out[self._run].view(by_query.shape).copy_(by_query)
            return
        taken = by_query.reshape(-1, *out.shape[1:])
        if not self._is_full:
            taken = taken.index_select(0, self._kept)
        out.index_copy_(0, self._scattered, taken.to(out.dtype))

    def _by_query(self, rows: Tensor) -> Tensor:
        """Return a view of [B, R, D] as [sequences, tokens, key heads, G, D]."""
        by_head = rows[:, : self.queries].unflatten(0, (-1, self.shape.kv_heads))
        by_query: Tensor = by_head.unflatten(2, (self.tokens, self.shape.group)).transpose(1, 2)
        return by_query

    def of_heads(self, x: Tensor) -> Tensor:
        """Expand one number per head, [H], to float32 [B, R]."""
        by_group = x.float().view(1, self.shape.kv_heads, 1, self.shape.group)
        by_row = by_group.expand(len(self._positions), -1, self.tokens, -1)
        return F.pad(by_row.reshape(-1, self.queries), (0, self.rows - self.queries))

    def zero_padding_(self, rows: Tensor) -> Tensor:
        """Zero the rows of [B, R, D] that stand for no query, before sums over rows."""
        if not self._is_full:
            self._by_query(rows).mul_(self.is_query[:, :, None, None, None])
        return rows

    def seen(self, span: slice) -> slice:
        """Return the blocks of a span that some row sees; check `sees` first."""
        return slice(max(span.start, self.blocks.start), min(span.stop, self.blocks.stop))

    def sees(self, span: slice) -> bool:
        return bool(span.start < self.blocks.stop and self.blocks.start < span.stop)

    def of(self, keys: Tensor, span: slice, blocks: slice | None = None) -> Tensor:
        """Return the tile's keys of a span: [sequences x key heads, keys, D] -> [B, keys', D].

        They are the keys of `blocks`, or of all blocks that some row sees.
        """
        blocks = self.seen(span) if blocks is None else blocks
        start, stop = (KEY_BLOCK * (block - span.start) for block in (blocks.start, blocks.stop))
        return keys[: self.batch, start:stop]

    def scores(self, q: Tensor, keys: Tensor, softcap: float | None) -> Tensor:
        """Compute capped products of [B, R, D] with [B, keys, D], also for keys that a row cannot see.

        Return [B, R, keys].
        """
        scores = torch.bmm(pad_rows(q, ROW_MULTIPLE), keys.transpose(1, 2))[
            :, : self.rows
        ].contiguous()
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        return scores

    def largest(self, scores: Tensor, span: slice) -> Tensor:
        """Return the largest visible score of each row in each chunk C of a span, or LEAST.

        [B, R, keys] -> [B, R, C]
        """
        unmasked, masked, visible = self._split(scores, span)
        if not masked.shape[-1]:
            return by_chunk(scores).amax(-1).clamp_(min=LEAST)
        masked = torch.minimum(masked, (visible - 0.5) * float("inf")).flatten(0, 1)
        if scores.shape[-1] > KEY_CHUNK:
            scores = torch.cat([unmasked, masked], dim=-1)
            return by_chunk(scores).amax(-1).clamp_(min=LEAST)
        largest = masked.amax(-1, keepdim=True).clamp_(min=LEAST)
        if unmasked.shape[-1]:
            largest = torch.maximum(largest, unmasked.amax(-1, keepdim=True))
        return largest

    def weigh_(self, scores: Tensor, subtrahend: Tensor, span: slice) -> Tensor:
        """Compute `exp(scores - subtrahend)` in place, 0 for keys that a row cannot see.

        subtrahend: [B, R, C] or [B, R, 1], no less than the row's largest visible score.

        Invisible scores are exponentiated as 0 and multiplied by 0: a library's exp of -inf takes
        up to 25 times as long.
        """
        scores.view(*scores.shape[:2], subtrahend.shape[-1], -1).sub_(subtrahend[..., None])
        _, masked, visible = self._split(scores, span)
        if not masked.shape[-1]:
            return scores.exp_()
        masked.clamp_(max=0)
        scores.exp_()
        masked.mul_(visible)
        return scores

    def _split(self, scores: Tensor, span: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Split scores into keys that every row sees and keys that some rows see, with their mask.

        [B, R, keys] -> [B, R, k], [sequences, key heads, R, keys - k], [sequences, 1, R, keys - k]
        """
        blocks = self.seen(span)
        first = max(self._first_masked, blocks.start)
        unmasked = (min(first, blocks.stop) - blocks.start) * KEY_BLOCK
        masked = scores.unflatten(0, (-1, self.shape.kv_heads))[..., unmasked:]
        start = (first - self._first_masked) * KEY_BLOCK
        visible = self._visible[..., start : start + masked.shape[-1]]
        return scores[..., :unmasked], masked, visible

    @cached_property
    def _visible(self) -> Tensor:
        """Return 1.0 for keys of the masked blocks that a row sees, else 0.0: [sequences, 1, R, keys].

        It is computed once for all layers, which share the tile.
        """
        key = torch.arange(self._first_masked * KEY_BLOCK, self.blocks.stop * KEY_BLOCK).float()
        position = self._positions[:, None, :, None].float()
        visible = torch.empty(*position.shape[:-1], len(key))
        torch.le(key, position, out=visible)  # several times as fast as booleans, and exact
        if self.shape.window:
            visible.mul_(key > position - self.shape.window)
        return visible


def by_chunk(rows: Tensor) -> Tensor:
    """View [B, R, keys] as [B, R, C, keys of a chunk]; keys are whole chunks or lie in one."""
    return rows.view(*rows.shape[:2], max(1, rows.shape[2] // KEY_CHUNK), -1)


def blocks_of(keys: Tensor) -> list[slice]:
    """Return the blocks of [B, keys, D], in order."""
    return [slice(i, i + KEY_BLOCK) for i in range(0, keys.shape[1], KEY_BLOCK)]


BATCH_FLOATS = 1 << 22
"""Upper bound for the keys and values of a batch's chunk (16 MiB), unless one sequence has more."""

LONG_FLOATS = 1 << 19
"""Upper bound where sequences have several chunks: products of large heads are large enough alone,
and keys that are contiguous in the store need not be copied."""

SPAN_FLOATS = 1 << 20
"""Upper bound for the keys and values of chunks that are multiplied together."""


class Batch:
    """Some sequences of a layout, longest queries first, and the tiles of query rows to compute.

    It holds only indices, so that all layers of a forward pass share it.
    """

    def __init__(
        self, layout: AttentionLayout, sequences: Sequence[int], heads: slice, shape: Shape
    ):
        self._stored_heads, self._heads = shape.kv_heads, heads
        self.query_heads = slice(heads.start * shape.group, heads.stop * shape.group)
        self.shape = replace(
            shape,
            heads=self.query_heads.stop - self.query_heads.start,
            kv_heads=heads.stop - heads.start,
        )
        chosen = torch.tensor(sequences)
        query_lens = torch.tensor(layout.query_lens)[chosen]
        key_lens = torch.tensor(layout.key_lens)[chosen]
        query_starts = torch.tensor([0, *layout.query_lens]).cumsum(0)[chosen]
        origins = first_seen(key_lens - query_lens, shape.window, KEY_CHUNK)
        firsts = first_seen(key_lens - query_lens, shape.window, KEY_BLOCK) - origins
        key_lens = key_lens - origins
        longest = int(query_lens[0])
        step = max(1, min(longest, KEY_BLOCK, MAX_ROWS // shape.group))
        self.tiles = [
            Tile(self.shape, first, min(step, longest - first), query_lens, query_starts, key_lens)
            for first in range(0, longest, step)
        ]
        self.blocks = slice(int(firsts.min()) // KEY_BLOCK, -(-int(key_lens.max()) // KEY_BLOCK))
        # Padding repeats a key of the sequence. Its weight is 0; but 0 times another sequence's
        # value, or one that the cache dropped, would not be 0 if that value were not finite.
        slots = torch.arange(self.blocks.start * KEY_BLOCK, self.blocks.stop * KEY_BLOCK)
        self._kept = slots, firsts[:, None], key_lens[:, None]
        slots = slots.clamp(firsts[:, None], key_lens[:, None] - 1)
        self._rows = layout.key_rows[chosen[:, None], origins[:, None] + slots]

        self.spans = _spans(self.blocks, self._chunks_at_a_time())
        """Ranges of blocks, in order, that cover the visible keys; each is some whole chunks, or
        part of one."""
        self._gathered = {span.start: self._places(span) for span in self.spans}

    def _chunks_at_a_time(self) -> int:
        """Return how many whole chunks to multiply at a time: several only for a decode step."""
        floats = KEY_CHUNK * len(self._rows) * self.shape.key_floats
        return max(1, SPAN_FLOATS // floats) if len(self.tiles) == 1 else 1

    def gather(self, store: Tensor, span: slice) -> Tensor:
        """Gather a span's rows of the store as float32 [B, keys, D]; B: sequence x key head.

        In a decode step of one sequence, contiguous rows are not copied.
        """
        places = self._gathered[span.start]
        if isinstance(places, slice) or len(self._rows) == 1:
            by_row = store[:, self._heads]
            rows = by_row[places] if isinstance(places, slice) else by_row.index_select(0, places)
            keys = rows.float().transpose(0, 1)
            return keys if len(self.tiles) == 1 else keys.contiguous()
        keys = store.view(-1, store.shape[-1]).index_select(0, places).float()
        return keys.view(len(self._rows) * self.shape.kv_heads, -1, store.shape[-1])

    def _places(self, span: slice) -> slice | Tensor:
        """Return a span's place: one sequence's rows of the store, or int64 [B x keys]."""
        rows = self._rows[:, self._keys(span)]
        if len(rows) == 1:
            first, count = int(rows[0, 0]), rows.shape[1]
            is_run = torch.equal(rows[0], torch.arange(first, first + count))
            return slice(first, first + count) if is_run else rows[0]
        heads = torch.arange(self._heads.start, self._heads.stop)
        return (rows[:, None] * self._stored_heads + heads[:, None]).view(-1)

    def scatter(self, keys: Tensor, span: slice, store: Tensor) -> None:
        """Write gradients [blocks, B, 64, D] to the keys' rows of `store`: the inverse of `gather`."""
        slots, first, stop = self._kept
        slots = slots[self._keys(span)]
        kept = (slots >= first) & (slots < stop)
        by_head = keys.transpose(0, 1).flatten(1, 2).unflatten(0, (len(kept), -1))
        by_key = by_head.transpose(1, 2)[kept]
        rows = self._rows[:, self._keys(span)][kept]
        store[:, self._heads].index_copy_(0, rows, by_key.to(store.dtype))

    def _keys(self, span: slice) -> slice:
        start = self.blocks.start
        return slice((span.start - start) * KEY_BLOCK, (span.stop - start) * KEY_BLOCK)


def _spans(blocks: slice, chunks_at_a_time: int) -> list[slice]:
    """Split `blocks` into spans of whole chunks, up to `chunks_at_a_time`, and the partial ends."""
    size, spans = KEY_CHUNK // KEY_BLOCK, []
    start = blocks.start
    while start < blocks.stop:
        chunks = (blocks.stop - start) // size if start % size == 0 else 0
        stop = start - start % size + size * max(1, min(chunks, chunks_at_a_time))
        spans.append(slice(start, min(stop, blocks.stop)))
        start = stop
    return spans


def batches_of(layout: AttentionLayout, shape: Shape, num_threads: int) -> list[Batch]:
    """Cut the sequences and heads into batches; the grouping changes no bit."""
    key = (shape, num_threads)
    if key not in layout.plans:
        plan = _plan(layout, shape, num_threads)
        layout.plans[key] = [Batch(layout, *part, shape) for part in plan]
    batches: list[Batch] = layout.plans[key]
    return batches


def _plan(layout: AttentionLayout, shape: Shape, num_threads: int) -> list[tuple[list[int], slice]]:
    """Return the sequences and key heads of each batch."""
    lens = _lens(layout, shape)
    # Greedy packing, longest first: a group grows until it reaches the limit or a thread's share.
    order = sorted(range(len(lens)), key=lambda s: lens[s], reverse=True)
    share = sum(keys for _, keys in lens) * shape.key_floats // num_threads
    groups: list[list[int]] = []
    longest = 0
    for s in order:
        longest = max(longest, lens[s][1])
        limit = min(BATCH_FLOATS if longest <= KEY_CHUNK else LONG_FLOATS, share)
        floats = min(longest, KEY_CHUNK) * shape.key_floats
        if not groups or (len(groups[-1]) + 1) * floats > limit:
            groups.append([])
            longest = lens[s][1]
        groups[-1].append(s)
    costs = [sum(q * keys for q, keys in (lens[s] for s in group)) for group in groups]
    plan = []
    for group, cost in zip(groups, costs, strict=True):
        # As many parts as the number of threads that the group's share of the work keeps busy.
        parts = min(shape.kv_heads, -(-cost * num_threads // sum(costs)))
        cuts = [shape.kv_heads * i // parts for i in range(parts + 1)]
        plan += [(group, slice(*cut)) for cut in pairwise(cuts)]
    return plan


def work(layout: AttentionLayout, shape: Shape) -> float:
    """Return the floating-point operations, padding included."""
    seen = shape.window or float("inf")
    fewest = ROW_MULTIPLE // shape.group
    pairs = sum(
        max(q, fewest) * KEY_BLOCK * -(-min(k, seen) // KEY_BLOCK) for q, k in _lens(layout, shape)
    )
    return 2.0 * pairs * shape.heads * (shape.dim + shape.value_dim)


def _lens(layout: AttentionLayout, shape: Shape) -> list[tuple[int, int]]:
    """Return each sequence's queries and its keys from the first visible chunk on, as counts."""
    lens = torch.tensor([layout.query_lens, layout.key_lens])
    lens[1] -= first_seen(lens[1] - lens[0], shape.window, KEY_CHUNK)
    return list(zip(*lens.tolist(), strict=True))
