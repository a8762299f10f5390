"""verl's rollout correction: `verl/trainer/ppo/rollout_corr_helper.py` on plain tensors.

Keys: rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold;
named presets: `PRESETS`. Results equal verl's, so

- bounds of `*_k1` options apply to 1 / rho = pi_rollout / pi_train, of rollout_is_threshold to rho;
- the mask rejects and weights do not: a rejected token keeps its weight, one that IcePop zeroes stays
  in the mask, and weights are normalised before rejection;
- the denominator of a loss over the returned mask leaves rejected tokens out (decoupled mode).

Unlike verl, which all-reduces over the default group wherever torch.distributed is initialised, this
communicates with other ranks only through `gather`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fallback_correction.adapters.verl import metrics as verl_metrics
from fallback_correction.adapters.verl.metrics import Metrics
from fallback_correction.adapters.verl.presets import Level, LossType
from fallback_correction.adapters.verl.thresholds import (
    RejectionOption,
    importance_bounds,
    rejection_options,
)
from fallback_correction.choices import require_choice
from fallback_correction.config import CorrectionConfig
from fallback_correction.importance_weights import (
    SMALLEST_MEAN,
    importance_weights,
    mean_weight,
)
from fallback_correction.mismatch_metrics import CLAMP
from fallback_correction.ratios import clamped, log_ratios
from fallback_correction.rejection import divergence
from fallback_correction.tokens import Gather, TokenBatch, alone


@torch.no_grad()
def compute_rollout_correction(
    config: Any,
    *,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    gather: Gather = alone,
) -> tuple[Tensor | None, Tensor, Metrics]:
    """Return weights, the mask after rejection, and metrics named `rollout_corr/*`, without gradient.

    config: a mapping or any object with verl's keys; a missing key has verl's default, which is no
    correction. Tensors [B, T], log-probabilities in nats. gather: over data-parallel ranks, for the
    mean of rollout_is_batch_normalize. Weights are float32 and 0 outside response_mask, or None; the
    mask has the dtype of response_mask.

    Raises ValueError for bad keys, shapes that differ, or a response_mask without a token.
    """
    require_choice("loss_type", _get(config, "loss_type", "ppo_clip"), LossType)
    _require_same_shapes(old_log_prob, rollout_log_prob, response_mask)
    batch = TokenBatch.padded(old_log_prob, rollout_log_prob, response_mask)
    r = log_ratios(batch)
    weights: Tensor | None = None
    metrics: Metrics = {}
    if (
        _get(config, "rollout_is") is not None
        and _get(config, "rollout_is_threshold", 2.0) is not None
    ):
        weights, metrics = _importance(config, batch, r, gather)
        weights = weights.view(response_mask.shape)
    keep = torch.ones_like(batch.mask)
    if _get(config, "rollout_rs") is not None:
        keep, rejections = _rejection(config, batch, r)
        metrics |= rejections
    metrics |= verl_metrics.mismatch(batch, r)
    mask = response_mask * keep.view(response_mask.shape).to(response_mask.dtype)
    return weights, mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _importance(
    config: Any, batch: TokenBatch, r: Tensor, gather: Gather
) -> tuple[Tensor, Metrics]:
    level = _get(config, "rollout_is")
    require_choice("rollout_is", level, Level)
    lower, upper = importance_bounds(_get(config, "rollout_is_threshold", 2.0))
    core = CorrectionConfig(level=level, lower=lower or 0.0, upper=upper, log_ratio_clamp=CLAMP)
    found = importance_weights(batch, r, core)
    weights = found.bounded
    metrics: Metrics = {}
    if lower is not None:
        outside = found.too_low | found.too_high
        weights = torch.where(outside, 0, found.raw)
        metrics["rollout_is_oob_ratio"] = verl_metrics.token_mean(batch, outside)
    bounds = (1 / upper if lower is None else lower, upper)
    metrics |= verl_metrics.importance(batch, level, r, found.raw, weights, bounds)
    if _get(config, "rollout_is_batch_normalize", False):
        mean = mean_weight(batch, weights, core, gather)
        factor = mean if mean > SMALLEST_MEAN else 1.0
        weights, metrics["rollout_is_batch_norm_factor"] = weights / factor, factor
    return weights, metrics


def _rejection(config: Any, batch: TokenBatch, r: Tensor) -> tuple[Tensor, Metrics]:
    """Return the tokens that all options keep, bool [N], and metrics."""
    names, threshold = _get(config, "rollout_rs"), _get(config, "rollout_rs_threshold")
    all_keep = torch.ones_like(batch.mask)
    metrics: Metrics = {}
    for option in rejection_options(names, threshold):
        values = _statistic(batch, r, option)
        keep = (values >= option.lower) & (values <= option.upper)
        metrics |= verl_metrics.rejection(batch, option, values, keep)
        all_keep = all_keep & keep
    metrics["rollout_rs_masked_fraction"] = verl_metrics.token_mean(batch, ~all_keep)
    metrics["rollout_rs_seq_masked_fraction"] = verl_metrics.sequence_mean(
        batch.sums(~all_keep) > 0
    )
    return all_keep, metrics


def _statistic(batch: TokenBatch, r: Tensor, option: RejectionOption) -> Tensor:
    """Return an option's statistic, [N]; a sequence's value at each of its tokens. Log-ratios are
    clamped to +- 20 first."""
    if option.statistic == "binary_kl":
        return _binary_kl(batch)
    values = divergence(clamped(r, CLAMP), option.statistic)
    if option.aggregation == "token":
        return values
    of_sequences = {"sum": batch.sums, "mean": batch.means, "max": batch.maxima}
    return batch.spread(of_sequences[option.aggregation](values))


def _binary_kl(batch: TokenBatch) -> Tensor:
    """Return the larger KL between "this token or another" under both policies, in nats: [N]."""
    p = batch.train_log_probs.exp().clamp(1e-6, 1 - 1e-6)
    q = batch.rollout_log_probs.exp().clamp(1e-6, 1 - 1e-6)

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))

    return torch.maximum(kl(p, q), kl(q, p))


def _require_same_shapes(old: Tensor, rollout: Tensor, mask: Tensor) -> None:
    if mask.dim() != 2 or not old.shape == rollout.shape == mask.shape:
        raise ValueError(
            f"old_log_prob={tuple(old.shape)}, rollout_log_prob={tuple(rollout.shape)}, "
            f"response_mask={tuple(mask.shape)}: must be the same [B, T]. Pad the shorter ones."
        )
    if not mask.any():
        raise ValueError("response_mask: must have a token that counts. Leave such batches out.")


def _get(config: Any, key: str, default: Any = None) -> Any:
    get = getattr(config, "get", None)
    return get(key, default) if callable(get) else getattr(config, key, default)
