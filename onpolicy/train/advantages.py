"""How much better each sampled token did than was to be expected: what a rollout came to, and what the
models say of its tokens, as advantages. Every rank makes those of its samples, once they are scored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor

from onpolicy.algorithm.advantages import (
    group_advantages,
    named_advantages,
    returns,
    whitening,
)
from onpolicy.algorithm.registry import ESTIMATORS, AdvantageEstimator
from onpolicy.train.batch import PackedBatch
from onpolicy.train.distributed import gather_vectors
from onpolicy.train.engine import Role
from onpolicy.train.penalties import after
from onpolicy.train.shares import Outcomes
from onpolicy.trajectory import Trajectory

ScoresByRole = Mapping[Role, Sequence[Any]]
"""What each model that was asked says of the tokens of each micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """A trajectory, and its scores before the first optimizer step on its rollout."""

    trajectory: Trajectory

    scores: Mapping[Role, Any]
    """What each model that was asked says of the R sampled tokens, `Values` of the critic and `Scores`
    of the others; at least the estimator's `roles`."""

    reward: float = 0.0
    """That of its sample, before any penalty."""

    baseline: float = 0.0
    """The reward of its group's greedy answer; 0 without one."""

    token_rewards: Sequence[float] | None = None
    """[R]: the rewards of its sampled tokens, if its episode said them."""

    penalties: Sequence[float] | None = None
    """[R]: what each token pays, in units of the reward; None: nothing."""


def shaped_rewards(scored: ScoredTrajectory) -> list[float]:
    """[R]: what each sampled token is rewarded with, in float64.

    That is what its episode said, or the sample's reward at the last token; less what the token pays.
    """
    count = scored.trajectory.num_sampled
    rewards = scored.token_rewards
    if rewards is None:
        rewards = [0.0] * (count - 1) + [scored.reward] * (count > 0)
    return [r - p for r, p in zip(rewards, scored.penalties or [0.0] * count, strict=True)]


class Estimator(ABC):
    """Makes the advantages of a rollout."""

    roles: frozenset[Role] = frozenset()
    """The models whose scores it reads, and that therefore score every rollout."""

    @abstractmethod
    def advantages(
        self, outcomes: Outcomes, ours: Mapping[int, ScoredTrajectory]
    ) -> dict[int, Tensor]:
        """The advantages of this rank's samples, float32 [R] of each; collective.

        outcomes: of all samples, on every rank the same. ours: this rank's trajectories, by the numbers
        that their samples have in the rollout. Whoever centres or whitens scores over the whole rollout
        takes `distributed.gather_by_number`, and adds up in the order of the numbers, so that the bits
        do not depend on the ranks.
        """

    def returns(self, ours: Mapping[int, ScoredTrajectory]) -> dict[int, Tensor]:
        """What the critic is to say of this rank's sampled tokens, float32 [R] of each sample; asked of
        those that read the critic."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """What it found in the last rollout, the same on every rank."""
        return {}


class RewardEstimator(Estimator):
    """Gives all tokens of a sample what its reward comes to (`algorithm/advantages.py`).

    Where tokens have rewards, or pay, reinforce gives each those from it to the end of its trajectory,
    remax these less the baseline, and reinforce_plus_plus these whitened. The others compare episodes,
    by what comes to one in all.
    """

    def __init__(
        self,
        kind: AdvantageEstimator,
        gamma: float = 1.0,
        named_weights: Mapping[str, float] | None = None,
    ):
        """gamma: the worth of a reward a token later. named_weights: those of gdpo's rewards."""
        self.kind, self.gamma, self.named_weights = kind, gamma, named_weights or {}

    def advantages(
        self, outcomes: Outcomes, ours: Mapping[int, ScoredTrajectory]
    ) -> dict[int, Tensor]:
        by_token = outcomes.has_token_rewards or self.gamma != 1
        if by_token and ESTIMATORS[self.kind].returns:
            return self._of_returns(ours)
        if self.kind == "gdpo":
            named = outcomes.named_rewards(self.named_weights)
            groups = named_advantages(named, self.named_weights, outcomes.episodes)
        else:
            groups = group_advantages(
                outcomes.rewards,
                self.kind,
                outcomes.lengths,
                outcomes.episodes,
                outcomes.baselines,
            )
        values = list(chain.from_iterable(groups))
        return {
            number: torch.full((scored.trajectory.num_sampled,), values[number])
            for number, scored in ours.items()
        }

    def _of_returns(self, ours: Mapping[int, ScoredTrajectory]) -> dict[int, Tensor]:
        found = {
            number: [x - scored.baseline for x in returns(shaped_rewards(scored), self.gamma)]
            for number, scored in ours.items()
        }
        if ESTIMATORS[self.kind].whitens:
            runs = [[(len([*same]), a) for a, same in groupby(each)] for each in found.values()]
            whitened = whitening(runs, gather_vectors)
            found = {number: [whitened(a) for a in each] for number, each in found.items()}
        return {number: torch.tensor(each, dtype=torch.float32) for number, each in found.items()}


def token_advantages(
    estimator: Estimator,
    outcomes: Outcomes,
    batches: Sequence[PackedBatch],
    scores: ScoresByRole,
    penalties: Mapping[int, Sequence[float]] | None = None,
) -> list[Tensor]:
    """The advantages of all tokens of each micro-batch of a rollout, float32 [R] of each; collective.

    penalties: what the tokens of this rank's samples pay, by their numbers, if there are any. Raises
    ValueError if the estimator gives a sample anything else than float32 [R] of its own.
    """
    ours = _ours(batches, scores, penalties)
    if penalties is not None:
        outcomes = after(outcomes, penalties)
    found = estimator.advantages(outcomes, ours)
    for number, scored in ours.items():
        shape, dtype = tuple(found[number].shape), found[number].dtype
        if shape != (scored.trajectory.num_sampled,) or dtype != torch.float32:
            raise ValueError(
                f"{type(estimator).__name__}: shape={shape}, dtype={dtype} are the advantages of sample "
                f"{number}, which has {scored.trajectory.num_sampled} sampled tokens. Give float32, one "
                "number a token."
            )
    return _by_batch(batches, found)


def token_returns(
    estimator: Estimator,
    batches: Sequence[PackedBatch],
    scores: ScoresByRole,
    penalties: Mapping[int, Sequence[float]] | None = None,
) -> list[Tensor]:
    """What the critic is to say of the tokens of each micro-batch, float32 [R] of each."""
    return _by_batch(batches, estimator.returns(_ours(batches, scores, penalties)))


def _ours(
    batches: Sequence[PackedBatch],
    scores: ScoresByRole,
    penalties: Mapping[int, Sequence[float]] | None,
) -> dict[int, ScoredTrajectory]:
    """This rank's trajectories, by the numbers that their samples have in the rollout."""
    ours: dict[int, ScoredTrajectory] = {}
    for i, batch in enumerate(batches):
        ours |= _scored_trajectories(batch, {role: each[i] for role, each in scores.items()})
    if penalties is not None:
        ours = {n: replace(scored, penalties=penalties[n]) for n, scored in ours.items()}
    return ours


def _by_batch(batches: Sequence[PackedBatch], found: Mapping[int, Tensor]) -> list[Tensor]:
    """Vectors of samples as those of micro-batches; zeros of a filler."""
    return [
        torch.cat([found[n].to(batch.mask.device) for n in batch.numbers])
        if batch.numbers
        else torch.zeros_like(batch.rollout_log_probs)
        for batch in batches
    ]


def _scored_trajectories(
    batch: PackedBatch, scores: Mapping[Role, Any]
) -> dict[int, ScoredTrajectory]:
    lens = batch.response_lens
    parts = {
        role: [whole._make(each) for each in zip(*(x.split(lens) for x in whole), strict=True)]
        for role, whole in scores.items()
    }
    return {
        number: ScoredTrajectory(
            trajectory=batch.samples[i].sample.trajectory,
            scores={role: each[i] for role, each in parts.items()},
            reward=batch.samples[i].sample.reward,
            baseline=batch.samples[i].baseline or 0.0,
            token_rewards=batch.samples[i].sample.token_rewards,
        )
        for i, number in enumerate(batch.numbers)
    }
