"""Advantages of sampled tokens, from the rewards of a rollout and the models' scores of its tokens.

Every rank computes the advantages of its own samples after scoring. Penalties, for the KL to the
reference and for overlong answers, are subtracted from the tokens' rewards before that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice
from math import fsum
from typing import Any

import torch
from torch import Tensor

from onpolicy.algorithm.catalogue import ESTIMATORS, AdvantageEstimator
from onpolicy.algorithm.estimators import group_advantages, returns, whitening
from onpolicy.algorithm.objectives import kl_estimate
from onpolicy.algorithm.token_baseline import score_norms, token_baseline_advantages
from onpolicy.config import TrainConfig
from onpolicy.training.batch import MicroBatch
from onpolicy.training.distributed import gather_by_number, gather_vectors
from onpolicy.training.engine import Role
from onpolicy.training.shares import Outcomes
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

    reads_squares = False
    """Whether it reads `SquaredScores` of the policy."""

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

    def metrics(self, ours: Mapping[int, ScoredTrajectory]) -> dict[str, float]:
        """Return metrics of the rollout, the same on every rank; collective."""
        return {}


class RewardEstimator(Estimator):
    """An estimator that gives all tokens of a sample one advantage from its reward
    (`algorithm/estimators.py`).

    With token rewards or penalties, reinforce gives each token the sum of rewards from it to the end of
    its trajectory, and reinforce_plus_plus whitens it. The other estimators compare episodes by their
    total rewards.
    """

    def __init__(self, kind: AdvantageEstimator, gamma: float = 1.0):
        """Take a discount `gamma` per token."""
        self.kind, self.gamma = kind, gamma

    def advantages(
        self, outcomes: Outcomes, ours: Mapping[int, ScoredTrajectory]
    ) -> dict[int, Tensor]:
        by_token = outcomes.has_token_rewards or self.gamma != 1
        if by_token and ESTIMATORS[self.kind].returns:
            return self._of_returns(ours)
        groups = group_advantages(outcomes.rewards, self.kind, outcomes.lengths, outcomes.episodes)
        values = list(chain.from_iterable(groups))
        return {
            number: torch.full((scored.trajectory.num_sampled,), values[number])
            for number, scored in ours.items()
        }

    def _of_returns(self, ours: Mapping[int, ScoredTrajectory]) -> dict[int, Tensor]:
        found = {
            number: returns(shaped_rewards(scored), self.gamma) for number, scored in ours.items()
        }
        if ESTIMATORS[self.kind].whitens:
            # Runs of equal values are counted, since whitening sums (count, value) pairs.
            runs = [[(len([*same]), a) for a, same in groupby(each)] for each in found.values()]
            whitened = whitening(runs, gather_vectors)
            found = {number: [whitened(a) for a in each] for number, each in found.items()}
        return {number: torch.tensor(each, dtype=torch.float32) for number, each in found.items()}


class TokenBaseline(Estimator):
    """The optimal token baseline (`algorithm/token_baseline.py`)."""

    roles = frozenset({"policy"})
    reads_squares = True

    def advantages(
        self, outcomes: Outcomes, ours: Mapping[int, ScoredTrajectory]
    ) -> dict[int, Tensor]:
        everyones = gather_by_number({number: self._read(each) for number, each in ours.items()})
        parts, found = iter(everyones.values()), list[list[float]]()
        for group in outcomes.rewards:
            columns = zip(*islice(parts, len(group)), strict=True)
            found += token_baseline_advantages(*columns)
        numbered = zip(everyones, found, strict=True)
        return {n: torch.tensor(each, dtype=torch.float32) for n, each in numbered if n in ours}

    @staticmethod
    def _read(scored: ScoredTrajectory) -> tuple[list[float], list[float]]:
        """Return G_t and W_t of its sampled tokens."""
        policy = scored.scores["policy"]
        norms = score_norms(policy.log_probs.double().tolist(), policy.squares.double().tolist())
        return returns(shaped_rewards(scored)), norms


def token_advantages(
    estimator: Estimator,
    outcomes: Outcomes,
    batches: Sequence[MicroBatch],
    ours: Mapping[int, ScoredTrajectory],
) -> list[Tensor]:
    """Return the advantages of all tokens of each micro-batch of a rollout, float32 [R] of each;
    collective.

    ours: this rank's trajectories (`scored_trajectories`). Raises ValueError if the estimator returns
    anything but float32 [R] for a sample.
    """
    found = estimator.advantages(outcomes, ours)
    for number, scored in ours.items():
        shape, dtype = tuple(found[number].shape), found[number].dtype
        if shape != (scored.trajectory.num_sampled,) or dtype != torch.float32:
            raise ValueError(
                f"{type(estimator).__name__}: shape={shape}, dtype={dtype} are the advantages of sample "
                f"{number}, which has {scored.trajectory.num_sampled} sampled tokens. Give float32, one "
                "number a token."
            )
    return by_batch(batches, found)


def scored_trajectories(
    batches: Sequence[MicroBatch],
    scores: ScoresByRole,
    penalties: Mapping[int, Sequence[float]] | None = None,
) -> dict[int, ScoredTrajectory]:
    """Return this rank's trajectories with their scores and penalties, by their samples' numbers in the
    rollout."""
    ours: dict[int, ScoredTrajectory] = {}
    for i, batch in enumerate(batches):
        ours |= _of_batch(batch, {role: each[i] for role, each in scores.items()})
    if penalties is not None:
        ours = {n: replace(scored, penalties=penalties[n]) for n, scored in ours.items()}
    return ours


def by_batch(batches: Sequence[MicroBatch], found: Mapping[int, Tensor]) -> list[Tensor]:
    """Concatenate vectors of samples into vectors of micro-batches; zeros for a filler."""
    return [
        torch.cat([found[n].to(batch.mask.device) for n in batch.numbers])
        if batch.numbers
        else torch.zeros_like(batch.rollout_log_probs)
        for batch in batches
    ]


def _of_batch(batch: MicroBatch, scores: Mapping[Role, Any]) -> dict[int, ScoredTrajectory]:
    lens = batch.response_lens
    parts = {
        role: [whole._make(each) for each in zip(*(x.split(lens) for x in whole), strict=True)]
        for role, whole in scores.items()
    }
    return {
        number: ScoredTrajectory(
            trajectory=batch.samples[i].trajectory,
            scores={role: each[i] for role, each in parts.items()},
            reward=batch.samples[i].reward,
            token_rewards=batch.samples[i].token_rewards,
        )
        for i, number in enumerate(batch.numbers)
    }


class Penalties:
    """The penalties that a run's flags select."""

    def __init__(self, config: TrainConfig):
        self.algorithm = config.algorithm
        self.longest = config.rollout.rollout_max_response_len

    @property
    def reads_reference(self) -> bool:
        """Return whether log-probabilities of policy and reference are needed before the loss."""
        return self.algorithm.kl_coef > 0

    def of(
        self,
        batches: Sequence[MicroBatch],
        old: Sequence[Tensor | None],
        reference: Sequence[Tensor | None],
    ) -> tuple[dict[int, list[float]] | None, dict[str, float]]:
        """Return the penalties of this rank's tokens, [R] for each sample number (None: no penalty),
        and metrics; collective.

        old, reference: log-probabilities float32 [R] of each micro-batch, where `reads_reference`.
        """
        if not (self.reads_reference or self.algorithm.overlong_buffer_len):
            return None, {}
        found: dict[int, list[float]] = {}
        metrics: dict[str, float] = {}
        for batch in batches:
            for number, sample in zip(batch.numbers, batch.samples, strict=False):
                length = sample.trajectory.num_sampled
                found[number] = [0.0] * (length - 1) + [self._overlong(length)] * (length > 0)
        if self.reads_reference:
            kl = self._kl(batches, old, reference)
            coef = self.algorithm.kl_coef
            found = {
                number: [paid + coef * x for paid, x in zip(found[number], each, strict=True)]
                for number, each in kl.items()
            }
            metrics = self._measured(kl)
        return found, metrics

    def _overlong(self, length: int) -> float:
        """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), which grows linearly over
        the last tokens."""
        buffer = self.algorithm.overlong_buffer_len
        if not buffer:
            return 0.0
        beyond = length - (self.longest - buffer)
        return max(beyond / buffer, 0.0)

    def _kl(
        self,
        batches: Sequence[MicroBatch],
        old: Sequence[Tensor | None],
        reference: Sequence[Tensor | None],
    ) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for batch, policy, ref in zip(batches, old, reference, strict=True):
            assert policy is not None and ref is not None
            kl = kl_estimate(policy, ref, "k1")
            kl = torch.where(batch.mask, kl, 0).double()
            parts = kl.cpu().split(batch.response_lens)
            found |= {n: part.tolist() for n, part in zip(batch.numbers, parts, strict=False)}
        return found

    def _measured(self, kl: Mapping[int, Sequence[float]]) -> dict[str, float]:
        means = gather_by_number({n: fsum(x) / max(len(x), 1) for n, x in kl.items()})
        return {"train/kl_in_reward": fsum(means.values()) / max(len(means), 1)}


def after(outcomes: Outcomes, ours: Mapping[int, Sequence[float]] | None) -> Outcomes:
    """Return the outcomes of all samples, with the sums of their penalties subtracted; collective.

    ours: penalties of this rank's tokens, by their samples' numbers; None if there are none.
    """
    if ours is None:
        return outcomes
    paid = gather_by_number({number: fsum(each) for number, each in ours.items()})
    left = iter(r - paid[number] for number, r in enumerate(chain.from_iterable(outcomes.rewards)))
    rewards = [[next(left) for _ in group] for group in outcomes.rewards]
    return replace(outcomes, rewards=rewards, has_token_rewards=True)
