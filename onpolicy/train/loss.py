"""The loss of one micro-batch, on the objectives of `onpolicy/algorithm`. R: its response tokens.

It is a sum, not a mean: every token carries its share of the global batch, so that the loss of a global
batch is the sum over micro-batches and ranks, however it is split.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fallback_correction.choices import require_choices
from onpolicy.algorithm.kl import kl_estimate, unbiased_kl
from onpolicy.algorithm.objectives import ObjectiveConfig, opsm_mask, token_loss
from onpolicy.algorithm.registry import KlType
from onpolicy.config import TrainConfig
from onpolicy.train.batch import WeighedBatch, completed

Metrics = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The settings of a run's loss."""

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    kl_loss_coef: float = 0.0
    kl_loss_type: KlType = "low_var_kl"
    use_unbiased_kl: bool = False

    opd_kl_coef: float = 0.0
    """Coefficient of the reverse KL to a teacher, where that is a loss."""

    entropy_coef: float = 0.0
    """Coefficient of the entropy, which is subtracted from the loss."""

    log_ratio_coef: float = 0.0
    """Coefficient of the squared log-ratio to the old policy."""

    positive_nll_coef: float = 0.0
    """Coefficient of -log pi of the samples to imitate."""

    rejected_in_kl: bool = False
    """Whether tokens that a correction rejected keep their KL penalty."""

    kl_cov_coef: float = 1.0
    """Coefficient of the absolute log-ratio of restrained tokens."""

    opsm_delta: float | None = None
    """Threshold of off-policy sequence masking; None: no masking."""

    def __post_init__(self) -> None:
        require_choices(self)

    @staticmethod
    def of(config: TrainConfig) -> LossSettings:
        """Return the loss settings that a run's flags select."""
        algorithm = config.algorithm
        return LossSettings(
            objective=ObjectiveConfig(
                kind=algorithm.policy_loss,
                eps_clip=algorithm.eps_clip,
                eps_clip_high=config.eps_clip_high,
                eps_clip_c=algorithm.eps_clip_c,
                importance_sampling_level=algorithm.importance_sampling_level,
                force_on_policy_ratio=algorithm.force_on_policy_ratio,
                sapo_tau_pos=algorithm.sapo_tau_pos,
                sapo_tau_neg=algorithm.sapo_tau_neg,
                vespo_k_pos=algorithm.vespo_k_pos,
                vespo_lambda_pos=algorithm.vespo_lambda_pos,
                vespo_k_neg=algorithm.vespo_k_neg,
                vespo_lambda_neg=algorithm.vespo_lambda_neg,
            ),
            kl_loss_coef=algorithm.kl_loss_coef,
            kl_loss_type=algorithm.kl_loss_type,
            use_unbiased_kl=algorithm.use_unbiased_kl,
            opd_kl_coef=config.distillation.opd_kl_coef,
            entropy_coef=algorithm.entropy_coef,
            log_ratio_coef=algorithm.log_ratio_coef,
            positive_nll_coef=algorithm.positive_nll_coef,
            kl_cov_coef=algorithm.kl_cov_coef,
            rejected_in_kl=config.fallback.rejected_in_kl,
            opsm_delta=algorithm.opsm_delta if algorithm.use_opsm else None,
        )


def policy_loss(
    log_probs: Tensor,
    batch: WeighedBatch,
    settings: LossSettings,
    entropy: Tensor | None = None,
    reverse_kl: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Return the objective with its corrections, plus the other terms that the settings enable.

    A term is the sum over tokens of value times share of the mean times weight in that term:
    denominators count all tokens, whatever their weights. The metric of a term is the same sum, except
    for the entropy's, which is unweighted.

    log_probs: float32 [R], with gradient. entropy: the policy's, float32 [R], in nats; without it there
    is no bonus. reverse_kl: to a teacher, float32 [R], in nats. Returns (loss, sums of metrics weighted
    like the loss), all scalars to be summed over the global batch. Raises NonfiniteError as
    `batch.correction` specifies.
    """
    batch = completed(batch, log_probs)
    total, shares, kept, metrics = _policy_term(log_probs, batch, settings)
    kl_shares = shares if settings.rejected_in_kl else kept
    if batch.ref_log_probs is not None:
        weighed = batch.with_weights(kl_shares, "kl_loss")
        kl_loss = _kl_loss(log_probs, batch, batch.ref_log_probs, settings, weighed)
        total = total + settings.kl_loss_coef * kl_loss
        metrics["train/kl_loss"] = kl_loss.detach()
    if reverse_kl is not None:
        distillation = weighted_sum(reverse_kl, batch.with_weights(kl_shares, "opd_kl"))
        total = total + settings.opd_kl_coef * distillation
        metrics["distillation/kl_loss"] = distillation.detach()
    if entropy is not None:
        if settings.entropy_coef:
            weighed = batch.with_weights(kept, "entropy")
            total = total - settings.entropy_coef * weighted_sum(entropy, weighed)
        metrics["train/entropy"] = weighted_sum(entropy.detach(), batch.shares)
    if settings.log_ratio_coef:
        squares = _squared_log_ratio(log_probs, batch, batch.with_weights(kept, "log_ratio"))
        total = total + settings.log_ratio_coef * squares
        metrics["train/squared_log_ratio"] = squares.detach()
    if batch.positive_shares is not None:
        imitated = torch.where(kept != 0, batch.positive_shares, 0)
        nll = weighted_sum(-log_probs, batch.with_weights(imitated, "positive_nll"))
        total = total + settings.positive_nll_coef * nll
        metrics["train/positive_nll"] = nll.detach()
    metrics["train/loss"] = total.detach()
    return total, metrics


def _policy_term(
    log_probs: Tensor, batch: WeighedBatch, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor, Metrics]:
    """Return the policy's part of the loss, the shares of counting and of kept tokens, and metrics."""
    old, tokens = batch.old_log_probs, batch.tokens(log_probs)
    assert old is not None  # the batch is completed
    shares = torch.where(batch.mask, batch.shares, 0)
    objective = token_loss(log_probs, old, batch.advantages, tokens, settings.objective)
    loss, metrics = objective.loss, dict[str, Tensor]()
    kept = shares * batch.kept
    factors = batch.with_weights(kept * batch.importance_weights, "objective")
    if settings.opsm_delta is not None:
        drifted = ~opsm_mask(
            log_probs, batch.rollout_log_probs, batch.advantages, tokens, settings.opsm_delta
        )
        metrics["train/opsm_fraction"] = (drifted * shares).sum()
        factors = factors * ~drifted
    if batch.learnt is not None:
        metrics["train/learnt_fraction"] = (batch.learnt * shares).sum()
        factors = factors * batch.learnt
    if batch.restrained is not None:
        r = torch.where(batch.restrained & batch.mask, log_probs - old, 0)
        loss = loss + settings.kl_cov_coef * r.abs()
    if batch.custom is not None:
        loss, mask, found = batch.custom(loss, log_probs.detach(), batch)
        kept, factors, metrics = kept * mask, factors * mask, metrics | found
    total = weighted_sum(loss, factors)
    with torch.no_grad():
        metrics["train/pg_loss"] = total.detach()
        metrics["train/pg_clipfrac"] = weighted_sum(objective.clipped.float(), shares)
        metrics["train/ppo_kl"] = weighted_sum(old - log_probs, shares)
    return total, shares, kept, metrics


def _squared_log_ratio(log_probs: Tensor, batch: WeighedBatch, factors: Tensor) -> Tensor:
    """Return the penalty (log pi - log pi_old)^2 of prime-rl, which verl's dro uses too."""
    assert batch.old_log_probs is not None  # the batch is completed
    log_probs, old = (torch.where(factors != 0, x, 0) for x in (log_probs, batch.old_log_probs))
    return weighted_sum((log_probs - old).square(), factors)


def weighted_sum(values: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of values times factors; a token with factor 0 adds nothing, even if its value is
    NaN."""
    return (torch.where(factors != 0, values, 0) * factors).sum()


def _kl_loss(
    log_probs: Tensor,
    batch: WeighedBatch,
    ref_log_probs: Tensor,
    settings: LossSettings,
    shares: Tensor,
) -> Tensor:
    # An infinite value times 0 is NaN, in the gradient too: masked values must not enter.
    log_probs, rollout, reference = (
        torch.where(shares != 0, values, 0)
        for values in (log_probs, batch.rollout_log_probs, ref_log_probs)
    )
    if settings.use_unbiased_kl:
        kl = unbiased_kl(log_probs, rollout, reference, settings.kl_loss_type)
    else:
        kl = kl_estimate(log_probs, reference, settings.kl_loss_type)
    return weighted_sum(kl, shares)
