"""Metrics of Miles' `mis.py`: one value a token, which Miles averages with its own reducer.

All functions take a packed batch and return tensors [N]; a sequence's value stands at each of its
tokens. Values outside the mask are undefined, and Miles' reducer leaves them out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fallback_correction.choices import require_choice
from fallback_correction.config import CorrectionSettings, Veto, WeightLevel
from fallback_correction.mismatch_metrics import CLAMP
from fallback_correction.ratios import clamped
from fallback_correction.rejection import apply_veto, divergence
from fallback_correction.tokens import TokenBatch

TokenMetrics = dict[str, Tensor]


def ratios(batch: TokenBatch, level: WeightLevel) -> Tensor:
    """Return rho of every token, or of its sequence, with log rho clamped to +- 20: float32 [N],
    positive."""
    require_choice("level", level, WeightLevel)
    r = batch.train_log_probs - batch.rollout_log_probs
    if level == "token":
        return torch.exp(clamped(r, CLAMP))
    logs = batch.sums(r) if level == "sequence" else batch.means(r)
    return batch.spread(torch.exp(clamped(logs, CLAMP))).float()


def mismatch_token_metrics(batch: TokenBatch) -> TokenMetrics:
    """Return metrics of the engines' mismatch, with or without a correction; logarithms are natural."""
    r = batch.train_log_probs - batch.rollout_log_probs
    train, rollout = batch.means(batch.train_log_probs), batch.means(batch.rollout_log_probs)
    of_sequences = {
        "training_log_ppl": -train,
        "training_ppl": torch.exp(-train),
        "rollout_log_ppl": -rollout,
        "rollout_ppl": torch.exp(-rollout),
        "log_ppl_diff": rollout - train,
        "log_ppl_abs_diff": (rollout - train).abs(),
        "ppl_ratio": torch.exp(rollout - train),
        "chi2_token": batch.means(torch.exp(2 * clamped(r.double(), CLAMP))) - 1,
        "chi2_seq": torch.expm1(2 * clamped(batch.sums(r), CLAMP)),
    }
    of_tokens = {"kl": -r, "k3_kl": divergence(r, "k3")}
    return of_tokens | {name: batch.spread(x).float() for name, x in of_sequences.items()}


def bound_metrics(settings: CorrectionSettings, raw: Tensor, bounded: Tensor) -> TokenMetrics:
    """Return the weights before and after their bounds, and which of them the bounds changed."""
    lower, upper = settings.weight_bounds
    low, high = (raw < lower).int(), (raw > upper).int()
    metrics = {"tis_weight_before_bound": raw, "tis_weight_after_bound": bounded}
    if settings.tis_mode == "truncate":
        return {**metrics, "tis_truncate_fraction": high}
    name = settings.tis_mode
    return {**metrics, f"tis_{name}_fraction_low": low, f"tis_{name}_fraction_high": high}


def rejection_metrics(settings: CorrectionSettings, values: Tensor) -> TokenMetrics:
    """Return which ratios lie beyond the bounds of rejection."""
    lower, upper = settings.rejection_bounds
    return {
        "rs_mask_fraction_low": (values < lower).int(),
        "rs_mask_fraction_high": (values > upper).int(),
    }


def veto_metrics(batch: TokenBatch, threshold: float) -> TokenMetrics:
    """Return which tokens veto, and their sequences; log-ratios are not clamped."""
    r = batch.train_log_probs - batch.rollout_log_probs
    tokens, _ = apply_veto(batch, r, Veto(lower=threshold))
    sequences = batch.spread(batch.sums(tokens.float()) > 0)
    return {
        "rs_catastrophic_token_fraction": tokens.int(),
        "rs_catastrophic_seq_fraction": sequences.int(),
    }


def final_metrics(batch: TokenBatch, weights: Tensor) -> TokenMetrics:
    """Return statistics of the final weights over each sequence's tokens; 0 for a sequence
    without any."""
    some = batch.counts > 0
    of_sequences = {
        "is_ratio_mean_final": batch.means(weights),
        "is_ratio_min_final": torch.where(some, -batch.maxima(-weights), 0),
        "is_ratio_max_final": torch.where(some, batch.maxima(weights), 0),
    }
    return {name: batch.spread(x).float() for name, x in of_sequences.items()}
