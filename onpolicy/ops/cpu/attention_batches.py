"""Batches of matrix products on a CPU, from the sequences, heads and keys of a layout.

A batch is some sequences with some of the key heads and the keys that their queries see; its tiles
are blocks of query tokens of these sequences. Threads share the batches: if there are fewer
sequences than threads, each thread takes some of a sequence's heads. Positions count from the first
chunk in which the sequence's queries see a key, so work grows with the window, not with the keys
before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from onpolicy.ops.cpu.attention_tiles import (
    KEY_BLOCK,
    KEY_CHUNK,
    MAX_ROWS,
    ROW_MULTIPLE,
    Shape,
    Tile,
    first_seen,
)
from onpolicy.ops.layouts import AttentionLayout

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
