"""Metrics of the mismatch between the two engines over the global batch, with or without a correction.

`estimator_report` adds the bias and the variance of policy-gradient estimators under that mismatch. The
stochastic-gradient-ascent lemma (Liu et al., "When Speed Kills Stability", part 1) bounds the progress
of a step of size eta on an L-smooth objective by

    eta <g, E[g^]> - L eta^2 / 2 (|E[g^]|^2 + Var[g^]),

so an estimator g^ loses progress by its bias |E[g^] - g| and by its variance. With w_t the weight that
an estimator gives token t of a response y ~ pi_rollout, and rho_y the product of all rho, which would
be unbiased as a weight,

    g^ = sum_t w_t A grad log pi(y_t),     |bias| <= B E[ |A| sum_t |w_t - rho_y| ],
    Var[g^] <= B^2 E[ (|A| sum_t w_t)^2 ] / n,

for scores |grad log pi| <= B and n responses (part 2: sums over t make the token-level bias O(T^2
Delta_max) and the sequence-level variance O((1 + chi^2)^T)). The report gives the two expectations as
means over the batch: in units of B, and of B^2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fallback_correction.config import CorrectionConfig, Level, Mode
from fallback_correction.correction import divergence, importance_weights
from fallback_correction.tokens import (
    Gather,
    TokenBatch,
    alone,
    clamped,
    exact_sum,
    global_sequence_mean,
    global_token_mean,
    log_ratios,
    without_nonfinite,
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


UNBOUNDED = float("inf")


@torch.no_grad()
def estimator_report(
    batch: TokenBatch, advantages: Tensor, upper: float = 2.0, gather: Gather = alone
) -> dict[str, float]:
    """Return `estimator/{no_is, token_is, ..., sequence_mis}_{bias, variance}`, equal on all ranks.

    advantages: float32 [N]; upper: the bound of TIS (truncated at it) and MIS (0 beyond it).
    """
    batch = without_nonfinite(batch, SKIP_NONFINITE)
    r = log_ratios(batch)
    count = max(exact_sum(gather((batch.counts > 0).double())), 1)
    report = {}
    estimators = _estimators(batch, r, upper)
    unbiased = estimators["sequence_is"]
    for name, weights in estimators.items():
        size = advantages.abs().double()
        bias = batch.sums(size * (weights - unbiased).abs())
        squared = batch.sums(size * weights).square()
        report[f"estimator/{name}_bias"] = global_sequence_mean(batch, bias, gather)
        report[f"estimator/{name}_variance"] = global_sequence_mean(batch, squared, gather) / count
    return report


def _estimators(batch: TokenBatch, r: Tensor, upper: float) -> dict[str, Tensor]:
    """Return the weights of every estimator: float64 [N] each."""
    weights = {"no_is": torch.where(batch.mask, 1.0, 0.0).double()}
    levels: tuple[Level, ...] = ("token", "sequence")
    kinds: dict[str, tuple[Mode, float]] = {
        "is": ("truncate", UNBOUNDED), "tis": ("truncate", upper), "mis": ("mask", upper),
    }  # fmt: skip
    for level in levels:
        for kind, (mode, bound) in kinds.items():
            config = CorrectionConfig(level=level, mode=mode, upper=bound)
            found = importance_weights(batch, r, config)
            kept = (
                torch.where(found.too_high, 0, found.bounded) if mode == "mask" else found.bounded
            )
            weights[f"{level}_{kind}"] = kept.double()
    return weights
