"""The critic: its values as advantages (GAE), and its training beside the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onpolicy.algorithm.estimators import generalized_advantages, value_loss, whitening
from onpolicy.config import TrainConfig
from onpolicy.config.groups import CriticConfig
from onpolicy.models.policy import Values
from onpolicy.training import distributed
from onpolicy.training.advantages import Estimator, ScoredTrajectory, shaped_rewards
from onpolicy.training.batch import MicroBatch
from onpolicy.training.engine import Role, ShardedModel, optimizer_step
from onpolicy.training.loss import weighted_sum
from onpolicy.training.rates import base_factor
from onpolicy.training.shares import Outcomes

Metrics = dict[str, float]


class GaeEstimator(Estimator):
    """Generalized advantages of each trajectory's tokens, whitened over the rollout.
    The critic's targets are advantages plus values, before whitening."""

    roles: frozenset[Role] = frozenset({"critic"})

    def __init__(self, config: CriticConfig, gamma: float):
        self.config, self.gamma = config, gamma

    def advantages(
        self, outcomes: Outcomes, ours: Mapping[int, ScoredTrajectory]
    ) -> dict[int, Tensor]:
        found = {number: self._advantages(scored) for number, scored in ours.items()}
        tokens = [[(1, a) for a in each] for each in found.values()]
        whitened = whitening(tokens, distributed.gather_vectors)
        return {number: torch.tensor([whitened(a) for a in x]) for number, x in found.items()}

    def returns(self, ours: Mapping[int, ScoredTrajectory]) -> dict[int, Tensor]:
        return {
            number: torch.tensor(self._advantages(scored)) + scored.scores["critic"].values.cpu()
            for number, scored in ours.items()
        }

    def _advantages(self, scored: ScoredTrajectory) -> list[float]:
        values = scored.scores["critic"].values.tolist()
        return generalized_advantages(shaped_rewards(scored), values, self.gamma, self.config.lambd)


class Critic:
    """A value model that learns the returns of a rollout; every method is collective."""

    def __init__(self, config: TrainConfig, model: ShardedModel):
        self.config, self.model = config, model

    def learns_alone(self, step: int) -> bool:
        """Return whether the policy is not trained on this rollout."""
        return step < self.config.critic.num_critic_only_steps

    def rate(self, step: int, number: int) -> float:
        """Return the learning rate of an optimizer step of a rollout, from their numbers alone."""
        flags, trainer = self.config.critic, self.config.trainer
        per_rollout = self.config.steps_per_rollout
        peak = trainer.lr if flags.critic_lr is None else flags.critic_lr
        schedule = replace(trainer, lr_warmup_steps=0)
        total = self.config.rollout.num_rollout * per_rollout
        return peak * base_factor(step * per_rollout + number, schedule, total)

    def take_step(self, micro_batches: Sequence[MicroBatch], rate: float) -> Metrics:
        """Take an optimizer step on this rank's micro-batches and return its metrics."""
        # The critic's routers choose their own experts, as in its scoring pass.
        own = [replace(b, packed=b.packed.with_own_routing()) for b in micro_batches]
        metrics, _ = optimizer_step(self.model, own, self._loss, None, rate)
        ours = {name: x for name, x in metrics.items() if name.startswith("critic/")}
        of_step = {"train/grad_norm", "train/lr", "train/loss_scale", "train/skipped_share"}
        told = {name.replace("train", "critic"): metrics[name] for name in of_step & metrics.keys()}
        return {**ours, **told}

    def _loss(self, scores: Values, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the value loss of a micro-batch and its metrics. Every counting token has its share,
        even if a correction rejected it: the critic learns the returns of the rollout as it was
        sampled."""
        assert batch.old_values is not None and batch.returns is not None
        shares = torch.where(batch.mask, batch.shares, 0)
        clip = self.config.critic.value_clip
        each = value_loss(scores.values, batch.old_values, batch.returns, clip)
        loss = weighted_sum(each.loss, shares)
        return loss, {
            "critic/vf_loss": loss.detach(),
            "critic/vf_clipfrac": weighted_sum(each.clipped.float(), shares),
            "critic/vpred_mean": weighted_sum(scores.values.detach(), shares),
        }


def known_variance(batches: Sequence[MicroBatch]) -> Metrics:
    """Return 1 - Var(returns - values) / (Var(returns) + 1e-5) over a rollout's tokens, before training
    on it, as in verl's `compute_data_metrics` (verl/trainer/ppo/metric_utils.py); collective."""
    sums = distributed.sum_micro_batches(map(_moments, batches))
    count = max(sums["count"], 1.0)

    def variance(of: str) -> float:
        return (sums[f"{of}_squares"] - sums[of] ** 2 / count) / max(count - 1, 1.0)

    known = 1 - variance("errors") / (variance("returns") + 1e-5)
    return {"critic/vf_explained_var": known, "critic/return_mean": sums["returns"] / count}


def _moments(batch: MicroBatch) -> dict[str, Any]:
    assert batch.old_values is not None and batch.returns is not None
    returns, values = (x[batch.mask].double().cpu() for x in (batch.returns, batch.old_values))
    moments = {"count": float(len(returns))}
    for name, x in (("returns", returns), ("errors", returns - values)):
        moments |= {name: math.fsum(x.tolist()), f"{name}_squares": math.fsum((x * x).tolist())}
    return moments
