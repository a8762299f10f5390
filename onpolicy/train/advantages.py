"""How much better each sampled token did than was to be expected: what a rollout came to, and what the
models say of its tokens, as advantages. Every rank makes those of its samples, once they are scored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import torch
from torch import Tensor

from onpolicy.algorithm.advantages import (
    AdvantageEstimator,
    group_advantages,
    returns,
    whitening,
)
from onpolicy.ops.log_probs import Scores
from onpolicy.train.batch import PackedBatch
from onpolicy.train.distributed import gather_vectors
from onpolicy.train.engine import Role
from onpolicy.train.shares import Outcomes
from onpolicy.trajectory import Trajectory

ScoresByRole = Mapping[Role, Sequence[Scores]]
"""What each model that was asked says of the tokens of each micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """A trajectory, and its scores before the first optimizer step on its rollout."""

    trajectory: Trajectory

    scores: Mapping[Role, Scores]
    """What each model that was asked says of the R sampled tokens; at least the estimator's `roles`."""

    token_rewards: Sequence[float] | None = None
    """[R]: the rewards of its sampled tokens, if its episode said them."""


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

    def metrics(self) -> dict[str, float]:
        """What it found in the last rollout, the same on every rank."""
        return {}


class RewardEstimator(Estimator):
    """Gives all tokens of a sample what its reward comes to (`algorithm/advantages.py`).

    Where tokens have rewards, reinforce gives each those from it to the end of its trajectory, and
    reinforce_plus_plus these whitened. The others compare episodes, by what comes to one in all.
    """

    def __init__(self, kind: AdvantageEstimator):
        self.kind = kind

    def advantages(
        self, outcomes: Outcomes, ours: Mapping[int, ScoredTrajectory]
    ) -> dict[int, Tensor]:
        if outcomes.has_token_rewards and self.kind in ("reinforce", "reinforce_plus_plus"):
            return self._of_returns(outcomes, ours)
        groups = group_advantages(outcomes.rewards, self.kind, outcomes.lengths, outcomes.episodes)
        values = list(chain.from_iterable(groups))
        return {
            number: torch.full((scored.trajectory.num_sampled,), values[number])
            for number, scored in ours.items()
        }

    def _of_returns(
        self, outcomes: Outcomes, ours: Mapping[int, ScoredTrajectory]
    ) -> dict[int, Tensor]:
        rewards = list(chain.from_iterable(outcomes.rewards))
        found = {
            number: [rewards[number]] * scored.trajectory.num_sampled
            if scored.token_rewards is None
            else returns(scored.token_rewards)
            for number, scored in ours.items()
        }
        if self.kind == "reinforce_plus_plus":
            runs = [[(len([*same]), a) for a, same in groupby(each)] for each in found.values()]
            whitened = whitening(runs, gather_vectors)
            found = {number: [whitened(a) for a in each] for number, each in found.items()}
        return {number: torch.tensor(each, dtype=torch.float32) for number, each in found.items()}


def token_advantages(
    estimator: Estimator, outcomes: Outcomes, batches: Sequence[PackedBatch], scores: ScoresByRole
) -> list[Tensor]:
    """The advantages of all tokens of each micro-batch of a rollout, float32 [R] of each; collective.

    Raises ValueError if the estimator gives a sample anything else than float32 [R] of its own.
    """
    ours: dict[int, ScoredTrajectory] = {}
    for i, batch in enumerate(batches):
        ours |= _scored_trajectories(batch, {role: each[i] for role, each in scores.items()})
    found = estimator.advantages(outcomes, ours)
    for number, scored in ours.items():
        shape, dtype = tuple(found[number].shape), found[number].dtype
        if shape != (scored.trajectory.num_sampled,) or dtype != torch.float32:
            raise ValueError(
                f"{type(estimator).__name__}: shape={shape}, dtype={dtype} are the advantages of sample "
                f"{number}, which has {scored.trajectory.num_sampled} sampled tokens. Give float32, one "
                "number a token."
            )
    return [
        torch.cat([found[n].to(batch.mask.device) for n in batch.numbers])
        if batch.numbers
        else torch.zeros_like(batch.rollout_log_probs)
        for batch in batches
    ]


def _scored_trajectories(
    batch: PackedBatch, scores: Mapping[Role, Scores]
) -> dict[int, ScoredTrajectory]:
    lens = batch.response_lens
    parts = {
        role: [Scores(*each) for each in zip(*(x.split(lens) for x in whole), strict=True)]
        for role, whole in scores.items()
    }
    return {
        number: ScoredTrajectory(
            trajectory=batch.samples[i].sample.trajectory,
            scores={role: each[i] for role, each in parts.items()},
            token_rewards=batch.samples[i].sample.token_rewards,
        )
        for i, number in enumerate(batch.numbers)
    }
