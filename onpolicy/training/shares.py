"""The split of a rollout's samples over ranks and micro-batches, made by the process that has them all.

Samples are packed into micro-batches up to a budget of tokens, and the micro-batches are spread evenly
over the ranks. The packing is a function of the samples alone, not of any rank's speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby

import numpy as np

from onpolicy.errors import ParityError, TrainingError
from onpolicy.models.token_labels import token_labels
from onpolicy.trajectory import Forks
from onpolicy.types import Sample

PAIRS_PER_TOKEN = 6144
"""Number of query-key pairs that cost as much as the rest of a token's computation: for a dense layer,
24 h^2 by 4 h operations at a hidden size h of 1,024."""


Steps = list[list[dict[int, Sample]]]
"""One rank's part of a rollout: the samples of each micro-batch of each optimizer step, by their
numbers in the whole rollout. All ranks have equally many micro-batches, some of which may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The results of all samples of a rollout, in order, by groups of one prompt, and the numbers of
    their tokens; every rank knows them."""

    rewards: list[list[float]]

    lengths: list[list[int]]
    """Number of sampled tokens of each sample."""

    episodes: list[list[int]]
    """Episode of each sample."""

    has_token_rewards: bool
    """Whether any sample has token rewards."""

    sampled: SampledTokens

    num_tokens: int
    """Number of tokens, prompts included."""

    lags: tuple[int, ...]
    """Distinct lags of tokens."""

    @staticmethod
    def of(samples: Sequence[Sample], num_steps: int) -> Outcomes:
        """Return what is known of samples that are trained on in `num_steps` optimizer steps."""
        groups = [list(group) for _, group in groupby(samples, key=lambda s: s.group)]
        return Outcomes(
            rewards=[[s.reward for s in group] for group in groups],
            lengths=[[s.trajectory.num_sampled for s in group] for group in groups],
            episodes=[[s.episode for s in group] for group in groups],
            has_token_rewards=any(s.token_rewards is not None for s in samples),
            sampled=SampledTokens.of(samples, split_into_steps(samples, num_steps)[0]),
            num_tokens=sum(len(s.trajectory.token_ids) for s in samples),
            lags=tuple(sorted({lag for s in samples for lag in np.unique(s.lags).tolist()})),
        )

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.rewards))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Number of sampled tokens of a rollout, and of those that cannot be compared.

    It is counted from the samples, independently of their micro-batches.
    """

    all: int

    older: int
    """Tokens of the first optimizer step that come from earlier weights."""

    later: int
    """Tokens of later optimizer steps, before which the policy changes."""

    @property
    def compared(self) -> int:
        """Return the number of tokens to compare."""
        return self.all - self.older - self.later

    @staticmethod
    def of(samples: Sequence[Sample], first_step: range) -> SampledTokens:
        """Count the tokens of samples, where `first_step` is the range of those in the first optimizer
        step.

        Raises ParityError for a sample with a token of unknown version.
        """
        counts = [s.trajectory.num_sampled for s in samples]
        of_first = [samples[i] for i in first_step]
        return SampledTokens(
            all=sum(counts),
            older=sum(map(_num_older, of_first)),
            later=sum(counts) - sum(counts[i] for i in first_step),
        )


def _num_older(sample: Sample) -> int:
    if (version := sample.policy_version) is None:
        return 0
    counts = [(span.version, span.end - span.start) for span in sample.trajectory.spans]
    told, sampled = sum(count for _, count in counts), sample.trajectory.num_sampled
    if told != sampled:
        raise ParityError(
            f"{sample.name}: spans={told} tokens, sampled={sampled}: where samples may lag, each "
            "sampled token comes from the weights of one push. Report it."
        )
    return sum(count for drawn_under, count in counts if drawn_under != version)


def make_shares(
    samples: Sequence[Sample],
    num_steps: int,
    num_ranks: int,
    max_tokens: int,
    shares_prefixes: bool = False,
) -> list[Steps]:
    """Split a rollout into every rank's share, for training in `num_steps` optimizer steps.

    shares_prefixes: whether the trainer computes a common prefix within a micro-batch once. Raises
    TrainingError for a token that several trajectories of its episode would train on.
    """
    for _, episode in groupby(samples, key=lambda s: s.episode):
        _require_learnt_once([*episode])
    shares: list[Steps] = [[] for _ in range(num_ranks)]
    # Each optimizer step is packed by itself, since gradients are summed within a step.
    for step in split_into_steps(samples, num_steps):
        own = [samples[i] for i in step]
        if shares_prefixes:
            plan = pack_groups(own, num_ranks, max_tokens)
        else:
            plan = pack([len(s.trajectory.token_ids) for s in own], num_ranks, max_tokens)
        for share, parts in zip(shares, plan, strict=True):
            share.append([{step[i]: own[i] for i in part} for part in parts])
    return shares


def _require_learnt_once(episode: Sequence[Sample]) -> None:
    learnt = defaultdict[Forks, set[int]](set)
    for sample in episode if len(episode) > 1 else ():
        trajectory = sample.trajectory
        for branch, start, end in trajectory.stretches:
            own = {i for i, is_own in enumerate(trajectory.sampled[start:end], start) if is_own}
            if twice := own & learnt[branch]:
                raise TrainingError(
                    f"prompt {sample.prompt.index}, sample {sample.sample_index}: {len(twice)} sampled "
                    f"tokens of its trajectory {sample.number}, the first at position {min(twice)}, "
                    "would be learnt in an earlier one too. Let a token that branches share count as "
                    "given in all but the first of them (onpolicy/rollout/results.py, learnt_once)."
                )
            learnt[branch] |= own


def split_into_steps(samples: Sequence[Sample], num_steps: int) -> list[range]:
    """Split samples into optimizer steps of whole episodes; the numbers of episodes differ by at most
    one."""
    numbers = [s.episode for s in samples]
    starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1]]
    edges = [*starts, len(samples)]
    return [range(edges[p.start], edges[p.stop]) for p in split_evenly(len(starts), num_steps)]


def split_evenly(count: int, parts: int) -> list[range]:
    """Split `range(count)` into `parts` consecutive ranges whose sizes differ by at most one."""
    base, extra = divmod(count, parts)
    ranges, start = [], 0
    for part in range(parts):
        stop = start + base + (part < extra)
        ranges.append(range(start, stop))
        start = stop
    return ranges


def pack(
    lens: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    costs: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Assign indices of samples to ranks and micro-batches: every rank has equally many micro-batches.

    Greedy: costliest sample first, each into the cheapest micro-batch with room; a sample longer than
    the budget gets a micro-batch of its own. Without `costs` a sample costs its tokens, and it takes
    n log n. Micro-batches may be empty (more ranks than samples), since ranks must run the same number
    of collective operations. The plan depends on the arguments alone, so every rank computes the same.
    """
    by_tokens, costs = costs is None, lens if costs is None else costs
    order = sorted(range(len(lens)), key=lambda i: (-costs[i], i))
    bins: list[list[int]] = []
    tokens: list[int] = []
    cheapest: list[tuple[int, int]] = []  # a heap of (cost, micro-batch)
    for i in order:
        aside: list[tuple[int, int]] = []
        # By tokens, no other has room where the cheapest has none.
        while not by_tokens and cheapest and tokens[cheapest[0][1]] + lens[i] > max_tokens:
            aside.append(heappop(cheapest))
        if cheapest and tokens[cheapest[0][1]] + lens[i] <= max_tokens:
            load, chosen = heappop(cheapest)
        else:
            load, chosen = 0, len(bins)
            bins.append([])
            tokens.append(0)
        bins[chosen].append(i)
        tokens[chosen] += lens[i]
        for each in (*aside, (load + costs[i], chosen)):
            heappush(cheapest, each)
    loads = {number: load for load, number in cheapest}
    # Deal micro-batches to the ranks in turn, costliest first, and pad with empty ones.
    fullest_first = sorted(range(len(bins)), key=lambda b: (-loads[b], b))
    per_rank = max(1, -(-len(bins) // num_ranks))
    padded = [sorted(bins[b]) for b in fullest_first]
    padded += [[] for _ in range(per_rank * num_ranks - len(bins))]
    return [padded[rank::num_ranks] for rank in range(num_ranks)]


def pack_groups(
    samples: Sequence[Sample], num_ranks: int, max_tokens: int
) -> list[list[list[int]]]:
    """Pack whole groups, whose shared prefixes are computed once, as `pack` does.

    Distinct tokens count for the budget; distinct tokens and their query-key pairs count for the
    balance. A group that is too large is split into parts, each of which computes its prompt again.
    """
    groups = groupby(range(len(samples)), key=lambda i: samples[i].group)
    parts = [part for _, group in groups for part in _parts([*group], samples, max_tokens)]
    plan = pack([x.tokens for x in parts], num_ranks, max_tokens, [x.cost for x in parts])
    return [[sorted(i for p in batch for i in parts[p].samples) for batch in rank] for rank in plan]


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


def _parts(group: list[int], samples: Sequence[Sample], max_tokens: int) -> list[_Part]:
    """Split a group into as many parts as its budget requires; samples with a common prefix are
    adjacent."""
    trajectories = [samples[i].trajectory for i in group]
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
