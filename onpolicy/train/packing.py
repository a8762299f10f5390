"""Packing of samples into micro-batches, as a function of the samples alone, not of any rank's speed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from onpolicy.models.token_labels import token_labels
from onpolicy.types import TrainSample

PAIRS_PER_TOKEN = 6144
"""Number of query-key pairs that cost as much as the rest of a token's computation: for a dense layer,
24 h^2 by 4 h operations at a hidden size h of 1,024."""


def pack(
    lens: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    costs: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Assign indices of samples to ranks and micro-batches: every rank has equally many micro-batches.

    Greedy: costliest sample first, each into the cheapest micro-batch with room; a sample longer than
    the budget gets a micro-batch of its own. Without `costs` a sample costs its tokens. Micro-batches
    may be empty (more ranks than samples), since ranks must run the same number of collective
    operations. The plan depends on the arguments alone, so every rank computes the same.
    """
    costs = lens if costs is None else costs
    order = sorted(range(len(lens)), key=lambda i: (-costs[i], i))
    bins: list[list[int]] = []
    tokens: list[int] = []
    loads: list[int] = []
    for i in order:
        with_room = (b for b in range(len(bins)) if tokens[b] + lens[i] <= max_tokens)
        chosen = min(with_room, key=lambda b: (loads[b], b), default=len(bins))
        if chosen == len(bins):
            bins.append([])
            tokens.append(0)
            loads.append(0)
        bins[chosen].append(i)
        tokens[chosen] += lens[i]
        loads[chosen] += costs[i]
    # Deal micro-batches to the ranks in turn, costliest first, and pad with empty ones.
    fullest_first = sorted(range(len(bins)), key=lambda b: (-loads[b], b))
    per_rank = max(1, -(-len(bins) // num_ranks))
    padded = [sorted(bins[b]) for b in fullest_first]
    padded += [[] for _ in range(per_rank * num_ranks - len(bins))]
    return [padded[rank::num_ranks] for rank in range(num_ranks)]


@dataclass(slots=True)
class _Part:
    """Samples of one group that share a micro-batch."""

    samples: list[int] = field(default_factory=list)

    tokens: int = 0
    """Number of distinct tokens."""

    pairs: int = 0
    """Number of query-key pairs of the distinct tokens."""

    def add(self, sample: int, length: int, shared: int) -> None:
        """Add a sample of `length` tokens, of which the part already has the first `shared`."""
        self.samples.append(sample)
        self.tokens += length - shared
        self.pairs += (length * (length + 1) - shared * (shared + 1)) // 2

    @property
    def cost(self) -> int:
        return self.tokens + self.pairs // PAIRS_PER_TOKEN


def pack_groups(
    samples: Sequence[TrainSample], num_ranks: int, max_tokens: int
) -> list[list[list[int]]]:
    """Pack whole groups, whose shared prefixes are computed once, as `pack` does.

    Distinct tokens count for the budget; distinct tokens and their query-key pairs count for the
    balance. A group that is too large is split into parts, each of which computes its prompt again.
    """
    groups = groupby(range(len(samples)), key=lambda i: samples[i].group)
    parts = [part for _, group in groups for part in _parts([*group], samples, max_tokens)]
    plan = pack([x.tokens for x in parts], num_ranks, max_tokens, [x.cost for x in parts])
    return [[sorted(i for p in batch for i in parts[p].samples) for batch in rank] for rank in plan]


def _parts(group: list[int], samples: Sequence[TrainSample], max_tokens: int) -> list[_Part]:
    """Split a group into as many parts as its budget requires; samples with a common prefix are
    adjacent."""
    trajectories = [samples[i].sample.trajectory for i in group]
    labels = [token_labels(t.token_ids, t.routed_experts) for t in trajectories]
    parts: list[_Part] = []
    before: Sequence[Hashable] = ()
    # In sorted order each sample shares its longest prefix with the one before it.
    for at in sorted(range(len(group)), key=lambda i: labels[i]):
        length, shared = len(labels[at]), _common(before, labels[at])
        if not parts or parts[-1].tokens + length - shared > max_tokens:
            parts.append(_Part())
            shared = 0
        parts[-1].add(group[at], length, shared)
        before = labels[at]
    return parts


def _common(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Return the length of the common prefix of two sequences of labels."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
