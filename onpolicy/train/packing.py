"""Samples into micro-batches: packed to a token budget, spread evenly over ranks."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lens: Sequence[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Indices of samples, by rank and micro-batch: every rank has equally many micro-batches.

    Longest first, each into the micro-batch with most room; a sample longer than the budget gets
    a micro-batch of its own. Micro-batches may be empty (more ranks than samples), since ranks
    must take part in the same number of collective operations. Depends on its arguments alone, so
    every rank computes the same plan.
    """
    order = sorted(range(len(lens)), key=lambda i: (-lens[i], i))
    bins: list[list[int]] = []
    tokens: list[int] = []
    for i in order:
        emptiest = min(range(len(bins)), key=lambda b: (tokens[b], b), default=None)
        if emptiest is None or tokens[emptiest] + lens[i] > max_tokens:
            emptiest = len(bins)
            bins.append([])
            tokens.append(0)
        bins[emptiest].append(i)
        tokens[emptiest] += lens[i]
    fullest_first = sorted(range(len(bins)), key=lambda b: (-tokens[b], b))
    per_rank = max(1, -(-len(bins) // num_ranks))
    padded = [sorted(bins[b]) for b in fullest_first]
    padded += [[] for _ in range(per_rank * num_ranks - len(bins))]
    return [padded[rank::num_ranks] for rank in range(num_ranks)]


def split_evenly(count: int, parts: int) -> list[range]:
    """`range(count)` cut into `parts` consecutive ranges whose sizes differ by at most one."""
    base, extra = divmod(count, parts)
    ranges, start = [], 0
    for part in range(parts):
        stop = start + base + (part < extra)
        ranges.append(range(start, stop))
        start = stop
    return ranges
