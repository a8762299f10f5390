"""Metrics of the mismatch between the two engines over the global batch, with or without a
correction."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fallback_correction.config import CorrectionConfig
from fallback_correction.ratios import clamped, log_ratios, without_nonfinite
from fallback_correction.rejection import divergence
from fallback_correction.tokens import (
    Gather,
    TokenBatch,
    alone,
    global_sequence_mean,
    global_token_mean,
)

CLAMP = 20.0

SKIP_NONFINITE = CorrectionConfig(nonfinite="reject")


@torch.no_grad()
def mismatch_metrics(batch: TokenBatch, gather: Gather = alone) -> dict[str, float]:
    """Return `mismatch/*`, equal on all ranks. r = log pi_train - log pi_rollout, in nats, per token.

    Log-ratios are clamped to +- 20 before exp, and `mismatch/clamped_fraction` counts the clamped ones;
    tokens that are not finite are left out, and `mismatch/nonfinite_fraction` counts them.
    """
    every, batch = batch, without_nonfinite(batch, SKIP_NONFINITE)
    r = log_ratios(batch).double()  # k3 of a small log-ratio needs the digits

    def mean(values: Tensor) -> float:
        return global_token_mean(batch, values, gather)

    return {
        "mismatch/nonfinite_fraction": global_token_mean(
            every, (every.mask & ~batch.mask).float(), gather
        ),
        "mismatch/clamped_fraction": mean((r.abs() > CLAMP).float()),
        "mismatch/k1": mean(divergence(r, "k1")),
        "mismatch/k3": mean(divergence(clamped(r, CLAMP), "k3")),
        "mismatch/abs_diff": mean(r.abs()),
        "mismatch/tv": mean(torch.expm1(clamped(r, CLAMP)).abs() / 2),
        "mismatch/chi2_token": mean(torch.expm1(clamped(2 * r, 2 * CLAMP))),
        "mismatch/ess": _effective_sample_size(batch, r, gather),
        **_sequence_metrics(batch, r, gather),
        **_probability_metrics(batch, gather),
    }


def _effective_sample_size(batch: TokenBatch, r: Tensor, gather: Gather) -> float:
    """Return (sum w)^2 / (n sum w^2) of the token weights: the effective share of the batch, in
    (0, 1]."""
    weights = torch.exp(clamped(r, CLAMP))
    mean = global_token_mean(batch, weights, gather, default=1.0)
    return mean**2 / global_token_mean(batch, weights.square(), gather, default=1.0)


def _sequence_metrics(batch: TokenBatch, r: Tensor, gather: Gather) -> dict[str, float]:
    train, rollout = batch.means(batch.train_log_probs), batch.means(batch.rollout_log_probs)
    total = batch.sums(r)

    def mean(values: Tensor) -> float:
        return global_sequence_mean(batch, values, gather)

    return {
        "mismatch/train_log_ppl": mean(-train),
        "mismatch/rollout_log_ppl": mean(-rollout),
        "mismatch/log_ppl_diff": mean(rollout - train),
        "mismatch/log_ppl_abs_diff": mean((rollout - train).abs()),
        # arXiv 2602.01826, eq. 7 has no division by the length.
        "mismatch/log_ppl_abs_diff_sum": mean(total.abs()),
        "mismatch/chi2_sequence": mean(torch.expm1(clamped(2 * total, 2 * CLAMP))),
    }


def _probability_metrics(batch: TokenBatch, gather: Gather) -> dict[str, float]:
    train, rollout = batch.train_log_probs.double().exp(), batch.rollout_log_probs.double().exp()
    difference = (train - rollout).abs()

    def mean(values: Tensor) -> float:
        return global_token_mean(batch, values, gather)

    def covariance(x: Tensor, y: Tensor) -> float:
        return mean((x - mean(x)) * (y - mean(y)))

    largest = gather(batch.maxima(difference))
    spread = math.sqrt(covariance(train, train) * covariance(rollout, rollout))
    return {
        "mismatch/prob_diff_mean": mean(difference),
        "mismatch/prob_diff_max": max(largest.max().item(), 0.0) if len(largest) else 0.0,
        "mismatch/prob_diff_std": math.sqrt(covariance(difference, difference)),
        "mismatch/prob_pearson": covariance(train, rollout) / spread if spread else 1.0,
    }
