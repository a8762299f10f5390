"""The loss of one micro-batch, on the objectives of `onpolicy/algorithm`. R: its response tokens.

It is a sum, not a mean: every token carries its share of the global batch, so that the loss of a global
batch is the sum over micro-batches and ranks, however it is split.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fallback_correction.config import Level
from fallback_correction.effective_rate import WEIGHT_SUMS, weight_sums
from fallback_correction.ranges import require_choices
from fallback_correction.score_centering import centering
from onpolicy.algorithm.catalogue import KlType
from onpolicy.algorithm.objectives import ObjectiveConfig, kl_estimate, token_loss
from onpolicy.config import TrainConfig
from onpolicy.system.user_functions import load_function
from onpolicy.training.batch import MicroBatch, completed

Metrics = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The settings of a run's loss."""

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    kl_loss_coef: float = 0.0
    kl_loss_type: KlType = "low_var_kl"

    opd_kl_coef: float = 0.0
    """Coefficient of the reverse KL to a teacher, where that is a loss."""

    entropy_coef: float = 0.0
    """Coefficient of the entropy, which is subtracted from the loss."""

    sums_weights: Level = "none"
    """Level at which importance weights are summed for the learning rate; none: they are not."""

    def __post_init__(self) -> None:
        require_choices(self)

    @staticmethod
    def of(config: TrainConfig) -> LossSettings:
        """Return the loss settings that a run's flags select.

        Raises ConfigError for an own objective that cannot be imported.
        """
        algorithm = config.algorithm
        path = algorithm.custom_loss_path
        return LossSettings(
            objective=ObjectiveConfig(
                kind=algorithm.policy_loss,
                eps_clip=algorithm.eps_clip,
                eps_clip_high=config.eps_clip_high,
                eps_clip_c=algorithm.eps_clip_c,
                custom=load_function(path, "--custom-loss-path") if path else None,
            ),
            kl_loss_coef=algorithm.kl_loss_coef,
            kl_loss_type=algorithm.kl_loss_type,
            opd_kl_coef=config.distillation.opd_kl_coef,
            entropy_coef=algorithm.entropy_coef,
            sums_weights=config.fallback.tis_level
            if config.trainer.lr_schedule == "ess"
            else "none",
        )


def policy_loss(
    log_probs: Tensor,
    batch: MicroBatch,
    settings: LossSettings,
    entropy: Tensor | None = None,
    reverse_kl: Tensor | None = None,
    likeliest_log_probs: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Return the objective with its corrections, plus the other terms that the settings enable.

    A term is the sum over tokens of value times share of the mean times weight in that term:
    denominators count all tokens, whatever their weights. The metric of a term is the same sum, except
    for the entropy's, which is unweighted.

    log_probs: float32 [R], with gradient. entropy: the policy's, float32 [R], in nats; without it there
    is no bonus. reverse_kl: to a teacher, float32 [R], in nats. likeliest_log_probs: of the engine's
    likeliest tokens, float32 [R, k], if the loss is centered. Returns (loss, sums of metrics weighted
    like the loss), all scalars to be summed over the global batch. Raises NonfiniteError as
    `batch.correction` specifies.
    """
    batch = completed(batch, log_probs)
    total, kept, metrics = _policy_term(log_probs, batch, settings)
    if likeliest_log_probs is not None:
        term, found = _centering_term(likeliest_log_probs, batch)
        total, metrics = total + term, metrics | found
    if batch.ref_log_probs is not None:
        weighed = batch.with_weights(kept, "kl_loss")
        kl_loss = _kl_loss(log_probs, batch.ref_log_probs, settings, weighed)
        total = total + settings.kl_loss_coef * kl_loss
        metrics["train/kl_loss"] = kl_loss.detach()
    if reverse_kl is not None:
        distillation = weighted_sum(reverse_kl, batch.with_weights(kept, "opd_kl"))
        total = total + settings.opd_kl_coef * distillation
        metrics["distillation/kl_loss"] = distillation.detach()
    if entropy is not None:
        if settings.entropy_coef:
            weighed = batch.with_weights(kept, "entropy")
            total = total - settings.entropy_coef * weighted_sum(entropy, weighed)
        metrics["train/entropy"] = weighted_sum(entropy.detach(), batch.shares)
    metrics["train/loss"] = total.detach()
    return total, metrics


def _policy_term(
    log_probs: Tensor, batch: MicroBatch, settings: LossSettings
) -> tuple[Tensor, Tensor, Metrics]:
    """Return the policy's part of the loss, the shares of kept tokens, and metrics."""
    old, tokens = batch.old_log_probs, batch.tokens(log_probs)
    assert old is not None  # the batch is completed
    shares = torch.where(batch.mask, batch.shares, 0)
    objective = token_loss(log_probs, old, batch.advantages, tokens, settings.objective)
    loss, metrics = objective.loss, dict[str, Tensor]()
    kept = shares * batch.kept
    factors = batch.with_weights(kept * batch.importance_weights, "objective")
    if batch.custom is not None:
        loss, mask, found = batch.custom(loss, log_probs.detach(), batch)
        kept, factors, metrics = kept * mask, factors * mask, metrics | found
    total = weighted_sum(loss, factors)
    if settings.sums_weights != "none":
        sums = weight_sums(tokens, batch.importance_weights * batch.kept, settings.sums_weights)
        metrics |= dict(zip(WEIGHT_SUMS, sums, strict=True))
    with torch.no_grad():
        metrics["train/pg_loss"] = total.detach()
        metrics["train/pg_clipfrac"] = weighted_sum(objective.clipped.float(), shares)
        metrics["train/ppo_kl"] = weighted_sum(old - log_probs, shares)
    return total, kept, metrics


def _centering_term(likeliest_log_probs: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
    """Return the part of the loss that centers the policy's scores, and metrics."""
    likeliest = batch.packed.likeliest
    assert likeliest is not None and batch.centering is not None
    ours, theirs = (
        torch.where(batch.centered[:, None], x, 0)
        for x in (likeliest_log_probs, likeliest.log_probs)
    )
    advantages = torch.where(batch.centered, batch.advantages, 0)
    shares = torch.where(batch.mask, batch.shares, 0)
    factors = batch.with_weights(shares * batch.centered, "objective")
    total = weighted_sum(advantages * centering(ours, theirs, batch.centering), factors)
    share = weighted_sum(likeliest.log_probs.exp().sum(-1), shares)
    return total, {"train/centering_loss": total.detach(), "train/likeliest_share": share}


def weighted_sum(values: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of values times factors; a token with factor 0 adds nothing, even if its value is
    NaN."""
    return (torch.where(factors != 0, values, 0) * factors).sum()


def _kl_loss(
    log_probs: Tensor, ref_log_probs: Tensor, settings: LossSettings, shares: Tensor
) -> Tensor:
    # An infinite value times 0 is NaN, in the gradient too: masked values must not enter.
    log_probs, reference = (torch.where(shares != 0, x, 0) for x in (log_probs, ref_log_probs))
    return weighted_sum(kl_estimate(log_probs, reference, settings.kl_loss_type), shares)
