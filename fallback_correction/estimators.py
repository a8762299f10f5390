"""Bias and variance of the policy-gradient estimators under the measured mismatch.

The stochastic-gradient-ascent lemma (Liu et al., "When Speed Kills Stability", part 1) bounds the
progress of a step of size eta on an L-smooth objective by

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

import torch
from torch import Tensor

from fallback_correction.config import CorrectionConfig, Level, Mode
from fallback_correction.importance_weights import importance_weights
from fallback_correction.mismatch_metrics import SKIP_NONFINITE
from fallback_correction.ratios import log_ratios, without_nonfinite
from fallback_correction.tokens import Gather, TokenBatch, alone, exact_sum, global_sequence_mean

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
