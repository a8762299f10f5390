"""Which samples of a rollout a rank computes, in which micro-batches; cut by whoever has them all.

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
    """What all samples of a rollout came to, in their order, by groups of one prompt."""

    rewards: list[list[float]]

    lengths: list[list[int]]
    """Sampled tokens."""

    episodes: list[list[int]]
    """The episode that each belongs to."""

    has_token_rewards: bool = False
    """Whether any sample has rewards of its tokens."""

    reward_parts: list[list[dict[str, float]]] = field(default_factory=list)
    """The named numbers that came with each reward."""

    baselines: list[float] = field(default_factory=list)
    """The reward of each group's greedy answer, if they have one."""

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
        """Return the named numbers, by groups like those of the rewards.

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
    """How many tokens of a rollout were sampled, and how many of them cannot be compared.

    Counted from the samples as a whole, and not from what becomes of them in micro-batches.
    """

    all: int

    older: int
    """Those of the first optimizer step that come from earlier weights."""

    later: int
    """Those of later optimizer steps, before which the policy changes."""

    @property
    def compared(self) -> int:
        """The tokens that are to be compared."""
        return self.all - self.older - self.later

    @staticmethod
    def of(samples: Sequence[TrainSample], first_step: range) -> SampledTokens:
        """Count the tokens of samples, of which some are those of the first optimizer step.

        Raises ParityError for a sample of which it is not known where every token comes from.
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
    """What one rank computes of a rollout. Samples have their numbers in the whole of it."""

    samples: dict[int, TrainSample]

    steps: list[list[list[int]]]
    """The samples of each micro-batch of each optimizer step; all ranks have equally many
    micro-batches, so that some may be empty."""

    outcomes: Outcomes
    """Those of all ranks."""

    sampled: SampledTokens
    """Those of all ranks."""

    num_tokens: int
    """Tokens of all ranks, prompts included."""

    lags: tuple[int, ...] = (0,)
    """Those that tokens of all ranks have."""

    shares_prefixes: bool = False
    """Whether samples of a micro-batch that begin alike have that computed once."""

    def micro_batches(self, step: int) -> list[dict[int, TrainSample]]:
        """The samples of each micro-batch of an optimizer step."""
        return [{i: self.samples[i] for i in part} for part in self.steps[step]]


def make_shares(
    samples: Sequence[TrainSample],
    num_steps: int,
    num_ranks: int,
    max_tokens: int,
    shares_prefixes: bool = False,
) -> list[Share]:
    """Every rank's share of a rollout that is trained on in so many optimizer steps.

    shares_prefixes: whether the trainer computes once what samples of a micro-batch begin with.
    Raises TrainingError for a token that several trajectories of its episode would learn.
    """
    for _, episode in groupby(samples, key=lambda s: s.episode):
        _require_learnt_once([s.sample for s in episode])
    lens = [len(s.sample.token_ids) for s in samples]
    plans, steps = [], split_into_steps(samples, num_steps)
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
    """A step's plan, by rank and micro-batch, with the numbers that its samples have in the rollout."""
    return [[[start + i for i in part] for part in rank] for rank in plan]


def split_into_steps(samples: Sequence[TrainSample], num_steps: int) -> list[range]:
    """The samples of each optimizer step, which has whole episodes: as many as any, or one more."""
    numbers = [s.episode for s in samples]
    starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1]]
    edges = [*starts, len(samples)]
    return [range(edges[p.start], edges[p.stop]) for p in split_evenly(len(starts), num_steps)]


def split_evenly(count: int, parts: int) -> list[range]:
    """`range(count)` cut into `parts` consecutive ranges whose sizes differ by at most one."""
    base, extra = divmod(count, parts)
    ranges, start = [], 0
    for part in range(parts):
        stop = start + base + (part < extra)
        ranges.append(range(start, stop))
        start = stop
    return ranges
