"""The loss of one micro-batch, on the objectives of `fallback_correction`. R: its response tokens.

Sums, not means: every token carries its share of the global batch, so that the loss of a global
batch is the sum over micro-batches and ranks, however it was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fallback_correction.kl import KlType, kl_estimate, unbiased_kl
from fallback_correction.objectives import ObjectiveConfig, opsm_mask, token_loss
from onpolicy.train.batch import MicroBatch

Metrics = dict[str, Tensor]

CustomCorrection = Callable[[Tensor, MicroBatch], tuple[Tensor, Tensor, Metrics]]
"""(loss [R], micro-batch) -> (loss [R], mask [R], metrics): the user's own correction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The choices of a run."""

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    kl_loss_coef: float = 0.0
    kl_loss_type: KlType = "k3"
    use_unbiased_kl: bool = False

    opsm_delta: float | None = None
    """Off-policy sequence masking, if any."""

    custom: CustomCorrection | None = None


def policy_loss(
    log_probs: Tensor, batch: MicroBatch, settings: LossSettings
) -> tuple[Tensor, Metrics]:
    """The objective with its corrections, and a KL penalty if the batch has a reference.

    log_probs: float32 [R], with gradient. Returns (loss, sums of metrics weighted like the loss), all
    scalars to be summed over the global batch.
    """
    assert batch.old_log_probs is not None and batch.shares is not None
    old, shares, tokens = batch.old_log_probs, batch.shares, batch.tokens(log_probs)
    objective = token_loss(log_probs, old, batch.advantages, tokens, settings.objective)
    loss, factors, metrics = objective.loss, shares, dict[str, Tensor]()
    if batch.importance_weights is not None:
        factors = factors * batch.importance_weights
    if settings.opsm_delta is not None:
        kept = opsm_mask(log_probs, old, batch.advantages, tokens, settings.opsm_delta)
        metrics["train/opsm_fraction"] = ((tokens.mask & ~kept) * shares).sum()
        factors = factors * kept
    if settings.custom is not None:
        loss, mask, metrics = settings.custom(loss, batch)
        factors = factors * mask
    total = _weighted_sum(loss, factors)
    with torch.no_grad():
        metrics["train/pg_loss"] = total.detach()
        metrics["train/pg_clipfrac"] = _weighted_sum(objective.clipped.float(), shares)
        metrics["train/ppo_kl"] = _weighted_sum(old - log_probs, shares)
    if batch.ref_log_probs is not None:
        kl_loss = _weighted_sum(_kl(log_probs, batch, settings), shares)
        total = total + settings.kl_loss_coef * kl_loss
        metrics["train/kl_loss"] = kl_loss.detach()
    metrics["train/loss"] = total.detach()
    return total, metrics


def _weighted_sum(values: Tensor, factors: Tensor) -> Tensor:
    """A token without a share adds nothing, whatever its value is."""
    return (torch.where(factors != 0, values, 0) * factors).sum()


def _kl(log_probs: Tensor, batch: MicroBatch, settings: LossSettings) -> Tensor:
    assert batch.ref_log_probs is not None and batch.old_log_probs is not None
    if settings.use_unbiased_kl:
        old = batch.old_log_probs
        return unbiased_kl(log_probs, old, batch.ref_log_probs, settings.kl_loss_type)
    return kl_estimate(log_probs, batch.ref_log_probs, settings.kl_loss_type)


def miles_correction(function: Callable[..., Any], args: object) -> CustomCorrection:
    """A function with the arguments that Miles and slime give to --custom-tis-function-path.

    It gets the micro-batch's per-token loss and lists of one tensor per sequence, and returns
    (loss [R], masks, metrics of [R]); metrics become `tis/<name>`, as shares of the global batch.
    """

    def correct(loss: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, Metrics]:
        assert batch.old_log_probs is not None and batch.shares is not None
        lens = batch.response_lens
        loss, masks, found = function(
            args,
            pg_loss=loss,
            train_log_probs=list(batch.old_log_probs.split(lens)),
            rollout_log_probs=list(batch.rollout_log_probs.split(lens)),
            loss_masks=list(batch.mask.float().split(lens)),
            total_lengths=[len(sample.token_ids) for sample in batch.samples],
            response_lengths=lens,
        )
        shares = batch.shares
        metrics = {f"tis/{name}": (_flat(value) * shares).sum() for name, value in found.items()}
        return loss, _flat(masks), metrics

    return correct


def _flat(values: Any) -> Tensor:
    return torch.cat(list(values)) if isinstance(values, (list, tuple)) else values
