"""The split of a rollout's samples over ranks and micro-batches, made by the process that has them all.

Micro-batches are packed to a budget of tokens (`packing.py`), and spread evenly over ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby

from onpolicy.errors import ParityError, TrainingError
from onpolicy.train.packing import pack, pack_groups
from onpolicy.trajectory import Forks
from onpolicy.types import Sample, TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The results of all samples of a rollout, in order, by groups of one prompt."""

    rewards: list[list[float]]

    lengths: list[list[int]]
    """Number of sampled tokens of each sample."""

    episodes: list[list[int]]
    """Episode of each sample."""

    has_token_rewards: bool = False
    """Whether any sample has token rewards."""

    reward_parts: list[list[dict[str, float]]] = field(default_factory=list)
    """Named parts of each reward."""

    baselines: list[float] = field(default_factory=list)
    """Reward of each group's greedy answer, if groups have one."""

    @staticmethod
    def of(samples: Sequence[TrainSample]) -> Outcomes:
        groups = [list(group) for _, group in groupby(samples, key=lambda s: s.group)]
        return Outcomes(
            rewards=[[s.sample.reward for s in group] for group in groups],
            lengths=[[s.sample.trajectory.num_sampled for s in group] for group in groups],
            episodes=[[s.episode for s in group] for group in groups],
            reward_parts=[[s.sample.reward_parts for s in group] for group in groups],
            has_token_rewards=any(s.sample.token_rewards is not None for s in samples),
            baselines=[group[0].baseline for group in groups if group[0].baseline is not None],
        )

    def named_rewards(self, names: Iterable[str]) -> dict[str, list[list[float]]]:
        """Return the named parts of the rewards, grouped like the rewards.

        Raises TrainingError for a sample that lacks one.
        """
        for parts in chain.from_iterable(self.reward_parts):
            if missing := [name for name in names if name not in parts]:
                raise TrainingError(
                    f"--gdpo-reward-keys={missing[0]}: a sample's reward has no part of that name, but "
                    f"{', '.join(parts) or 'none'}. Give names that the reward function returns."
                )
        return {name: [[p[name] for p in group] for group in self.reward_parts] for name in names}

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
    def of(samples: Sequence[TrainSample], first_step: range) -> SampledTokens:
        """Count the tokens of samples, where `first_step` is the range of those in the first optimizer
        step.

        Raises ParityError for a sample with a token of unknown version.
        """
        counts = [s.sample.trajectory.num_sampled for s in samples]
        of_first = [samples[i] for i in first_step]
        return SampledTokens(
            all=sum(counts),
            older=sum(map(_num_older, of_first)),
            later=sum(counts) - sum(counts[i] for i in first_step),
        )


def _num_older(trained: TrainSample) -> int:
    sample, version = trained.sample, trained.policy_version
    if version is None:
        return 0
    counts = [(span.version, span.end - span.start) for span in sample.trajectory.spans]
    told, sampled = sum(count for _, count in counts), sample.trajectory.num_sampled
    if told != sampled:
        raise ParityError(
            f"{sample.name}: spans={told} tokens, sampled={sampled}: where samples may lag, each "
            "sampled token comes from the weights of one push. Report it."
        )
    return sum(count for drawn_under, count in counts if drawn_under != version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a rollout. Samples keep their numbers in the whole rollout."""

    samples: dict[int, TrainSample]

    steps: list[list[list[int]]]
    """Samples of each micro-batch of each optimizer step; all ranks have equally many micro-batches,
    some of which may be empty."""

    outcomes: Outcomes
    """Outcomes on all ranks."""

    sampled: SampledTokens
    """Token counts over all ranks."""

    num_tokens: int
    """Number of tokens on all ranks, prompts included."""

    lags: tuple[int, ...] = (0,)
    """Distinct lags of tokens on all ranks."""

    shares_prefixes: bool = False
    """Whether a micro-batch computes a common prefix of its samples once."""

    def micro_batches(self, step: int) -> list[dict[int, TrainSample]]:
        """Return the samples of each micro-batch of an optimizer step."""
        return [{i: self.samples[i] for i in part} for part in self.steps[step]]


def make_shares(
    samples: Sequence[TrainSample],
    num_steps: int,
    num_ranks: int,
    max_tokens: int,
    shares_prefixes: bool = False,
) -> list[Share]:
    """Split a rollout into every rank's share, for training in `num_steps` optimizer steps.

    shares_prefixes: whether the trainer computes a common prefix within a micro-batch once. Raises
    TrainingError for a token that several trajectories of its episode would train on.
    """
    for _, episode in groupby(samples, key=lambda s: s.episode):
        _require_learnt_once([s.sample for s in episode])
    lens = [len(s.sample.token_ids) for s in samples]
    plans, steps = [], split_into_steps(samples, num_steps)
    # Each optimizer step is packed by itself, since gradients are summed within a step.
    for part in steps:
        if shares_prefixes:
            plan = pack_groups(samples[part.start : part.stop], num_ranks, max_tokens)
        else:
            plan = pack([lens[i] for i in part], num_ranks, max_tokens)
        plans.append(_numbered(plan, part.start))
    lags = tuple(sorted({lag for s in samples for lag in s.lags}))
    outcomes, sampled = Outcomes.of(samples), SampledTokens.of(samples, steps[0])
    return [
        Share(
            samples={i: samples[i] for step in own for part in step for i in part},
            steps=list(own),
            outcomes=outcomes,
            sampled=sampled,
            num_tokens=sum(lens),
            lags=lags,
            shares_prefixes=shares_prefixes,
        )
        for own in zip(*plans, strict=True)
    ]


def _require_learnt_once(episode: Sequence[Sample]) -> None:
    learnt = defaultdict[Forks, set[int]](set)
    for sample in episode if len(episode) > 1 else ():
        trajectory = sample.trajectory
        for branch, start, end in trajectory.stretches:
            own = {i for i in range(start, end) if trajectory.sampled[i]}
            if twice := own & learnt[branch]:
                raise TrainingError(
                    f"prompt {sample.prompt.index}, sample {sample.sample_index}: {len(twice)} sampled "
                    f"tokens of its trajectory {sample.number}, the first at position {min(twice)}, "
                    "would be learnt in an earlier one too. Let a token that branches share count as "
                    "given in all but the first of them (onpolicy/rollout/branches.py, learnt_once)."
                )
            learnt[branch] |= own


def _numbered(plan: list[list[list[int]]], start: int) -> list[list[list[int]]]:
    """Return a step's plan, by rank and micro-batch, with the samples' numbers in the rollout."""
    return [[[start + i for i in part] for part in rank] for rank in plan]


def split_into_steps(samples: Sequence[TrainSample], num_steps: int) -> list[range]:
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
