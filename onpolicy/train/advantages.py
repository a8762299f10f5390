"""Advantages of sampled tokens, from the rewards of a rollout and the models' scores of its tokens.
Every rank computes the advantages of its own samples after scoring."""

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
"""Scores of the tokens of each micro-batch, by the role of the model that computed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """A trajectory and its scores before the first optimizer step on its rollout."""

    trajectory: Trajectory

    scores: Mapping[Role, Any]
    """Scores of the R sampled tokens by each model that was asked: `Values` of the critic, `Scores` of
    the others; at least the estimator's `roles`."""

    reward: float = 0.0
    """Reward of its sample, before any penalty."""

    baseline: float = 0.0
    """Reward of its group's greedy answer; 0 without one."""

    token_rewards: Sequence[float] | None = None
    """Rewards of its sampled tokens, [R], if its episode gave them."""

    penalties: Sequence[float] | None = None
    """Penalty of each token, [R], in units of the reward; None: no penalty."""


def shaped_rewards(scored: ScoredTrajectory) -> list[float]:
    """Return the reward of each sampled token, [R], in float64.

    It is the episode's token reward, or the sample's reward at the last token and 0 before, minus the
    penalty.
    """
    count = scored.trajectory.num_sampled
    rewards = scored.token_rewards
    if rewards is None:
        rewards = [0.0] * (count - 1) + [scored.reward] * (count > 0)
    return [r - p for r, p in zip(rewards, scored.penalties or [0.0] * count, strict=True)]


class Estimator(ABC):
    """Base of estimators of a rollout's advantages."""

    roles: frozenset[Role] = frozenset()
    """Models whose scores it reads, and which therefore score every rollout."""

    @abstractmethod
    def advantages(
        self, outcomes: Outcomes, ours: Mapping[int, ScoredTrajectory]
    ) -> dict[int, Tensor]:
        """Return the advantages of this rank's samples, float32 [R] of each; collective.

        outcomes: of all samples, the same on every rank. ours: this rank's trajectories, by their
        samples' numbers in the rollout. An estimator that centres or whitens over the whole rollout
        must gather with `distributed.gather_by_number` and add in the order of the numbers, so that the
        bits do not depend on the ranks.
        """

    def returns(self, ours: Mapping[int, ScoredTrajectory]) -> dict[int, Tensor]:
        """Return the critic's targets for this rank's sampled tokens, float32 [R] of each sample;
        called for estimators that read the critic."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last rollout, the same on every rank."""
        return {}


class RewardEstimator(Estimator):
    """An estimator that gives all tokens of a sample one advantage from its reward
    (`algorithm/advantages.py`).

    With token rewards or penalties, reinforce gives each token the sum of rewards from it to the end of
    its trajectory, remax subtracts the baseline from that, and reinforce_plus_plus whitens it. The
    other estimators compare episodes by their total rewards.
    """

    def __init__(
        self,
        kind: AdvantageEstimator,
        gamma: float = 1.0,
        named_weights: Mapping[str, float] | None = None,
    ):
        """Take a discount `gamma` per token, and the weights of gdpo's named rewards."""
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
            # Runs of equal values are counted, since whitening sums (count, value) pairs.
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
    """Return the advantages of all tokens of each micro-batch of a rollout, float32 [R] of each;
    collective.

    penalties: penalties of this rank's tokens, by their samples' numbers, if there are any. Raises
    ValueError if the estimator returns anything but float32 [R] for a sample.
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
    """Return the critic's targets for the tokens of each micro-batch, float32 [R] of each."""
    return _by_batch(batches, estimator.returns(_ours(batches, scores, penalties)))


def _ours(
    batches: Sequence[PackedBatch],
    scores: ScoresByRole,
    penalties: Mapping[int, Sequence[float]] | None,
) -> dict[int, ScoredTrajectory]:
    """Return this rank's trajectories, by their samples' numbers in the rollout."""
    ours: dict[int, ScoredTrajectory] = {}
    for i, batch in enumerate(batches):
        ours |= _scored_trajectories(batch, {role: each[i] for role, each in scores.items()})
    if penalties is not None:
        ours = {n: replace(scored, penalties=penalties[n]) for n, scored in ours.items()}
    return ours


def _by_batch(batches: Sequence[PackedBatch], found: Mapping[int, Tensor]) -> list[Tensor]:
    """Concatenate vectors of samples into vectors of micro-batches; zeros for a filler."""
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
