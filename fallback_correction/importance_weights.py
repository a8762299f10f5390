"""Importance weights: from log-ratios to bounded, optionally self-normalised weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fallback_correction.config import CorrectionConfig
from fallback_correction.ratios import clamped, level_log_ratios
from fallback_correction.tokens import Gather, TokenBatch, exact_sum

SMALLEST_MEAN = 1e-8
"""Smallest mean by which weights are normalised, as in Miles and verl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of a batch. All [N]; `raw` and `bounded` are float32 and 0 outside the mask."""

    raw: Tensor
    bounded: Tensor

    too_low: Tensor
    too_high: Tensor
    """Tokens whose raw weight is above the upper bound, bool; `too_low`: below the lower one."""


def importance_weights(batch: TokenBatch, r: Tensor, config: CorrectionConfig) -> Weights:
    """Compute weights at `config.level`, bounded by `config.mode`; a weight equal to a bound is inside.

    r: float32 [N]. Truncation: Espeholt et al. 2018 (arXiv 1802.01561); masking: IcePop, MIS.
    """
    log_weights = level_log_ratios(batch, r, config.level)
    raw = torch.exp(clamped(log_weights, config.log_ratio_clamp))
    raw = torch.where(batch.mask, raw, 0)
    bounded = raw
    if config.mode == "truncate":
        bounded = raw.clamp(max=config.upper)
    elif config.mode == "clip":
        bounded = torch.where(batch.mask, raw.clamp(config.lower, config.upper), 0)
    return Weights(
        raw=raw,
        bounded=bounded,
        too_low=batch.mask & (raw < config.lower),
        too_high=batch.mask & (raw > config.upper),
    )


def mean_weight(
    batch: TokenBatch, weights: Tensor, config: CorrectionConfig, gather: Gather
) -> float:
    """Return the mean weight of the global batch: over tokens at level token, else over sequences.

    Sequences without a counting token take no part. The bits are the same for any split and order.
    """
    sums, counts = batch.sums(weights), batch.counts
    if config.level != "token":
        sums, counts = sums / counts.clamp(min=1), (counts > 0).double()
    total, count = exact_sum(gather(sums)), exact_sum(gather(counts))
    return total / count if count else 1.0
