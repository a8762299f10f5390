"""Which samples make a micro-batch together: a function of the samples alone, and of no rank's speed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from onpolicy.models.token_labels import token_labels
from onpolicy.types import TrainSample

PAIRS_PER_TOKEN = 6144
"""Pairs of a query and a key that cost what else is computed of a token: of a dense layer, 24 h^2 by 4 h
operations at a hidden size h of 1,024."""


def pack(
    lens: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    costs: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Indices of samples, by rank and micro-batch: every rank has equally many micro-batches.

    Costliest first, each into the micro-batch that costs least of those with room; a sample longer than
    the budget gets a micro-batch of its own. Without `costs` a sample costs its tokens. Micro-batches
    may be empty (more ranks than samples), since ranks must take part in the same number of collective
    operations. Depends on its arguments alone, so every rank computes the same plan.
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
    fullest_first = sorted(range(len(bins)), key=lambda b: (-loads[b], b))
    per_rank = max(1, -(-len(bins) // num_ranks))
    padded = [sorted(bins[b]) for b in fullest_first]
    padded += [[] for _ in range(per_rank * num_ranks - len(bins))]
    return [padded[rank::num_ranks] for rank in range(num_ranks)]


@dataclass(slots=True)
class _Part:
    """Samples of one group that come into a micro-batch together."""

    samples: list[int] = field(default_factory=list)

    tokens: int = 0
    """Distinct ones."""

    pairs: int = 0
    """Distinct tokens, each with every one that it sees."""

    def add(self, sample: int, length: int, shared: int) -> None:
        """A sample of so many tokens, the first of which one of these has already."""
        self.samples.append(sample)
        self.tokens += length - shared
        self.pairs += (length * (length + 1) - shared * (shared + 1)) // 2

    @property
    def cost(self) -> int:
        return self.tokens + self.pairs // PAIRS_PER_TOKEN


def pack_groups(
    samples: Sequence[TrainSample], num_ranks: int, max_tokens: int
) -> list[list[list[int]]]:
    """`pack` of whole groups, whose common beginnings are computed once.

    Distinct tokens count for the budget, and these and what they see in attention for the balance. A
    group that is too large comes in parts, each of which has its prompt anew.
    """
    groups = groupby(range(len(samples)), key=lambda i: samples[i].group)
    parts = [part for _, group in groups for part in _parts([*group], samples, max_tokens)]
    plan = pack([x.tokens for x in parts], num_ranks, max_tokens, [x.cost for x in parts])
    return [[sorted(i for p in batch for i in parts[p].samples) for batch in rank] for rank in plan]


def _parts(group: list[int], samples: Sequence[TrainSample], max_tokens: int) -> list[_Part]:
    """A group in as many as its budget asks for; samples that begin alike come one after another."""
    trajectories = [samples[i].sample.trajectory for i in group]
    labels = [token_labels(t.token_ids, t.routed_experts) for t in trajectories]
    parts: list[_Part] = []
    before: Sequence[Hashable] = ()
    for at in sorted(range(len(group)), key=lambda i: labels[i]):
        length, shared = len(labels[at]), _common(before, labels[at])
        if not parts or parts[-1].tokens + length - shared > max_tokens:
            parts.append(_Part())
            shared = 0
        parts[-1].add(group[at], length, shared)
        before = labels[at]
    return parts


def _common(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """How many labels two sequences begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
