"""Metrics of verl's rollout correction, without its prefix `rollout_corr/`.

They are scalars over the batch of the call. Where verl averages over sequences, one without a counting
token enters as 0 unless a comment says otherwise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fallback_correction.adapters.verl.presets import Level
from fallback_correction.adapters.verl.thresholds import RejectionOption, log
from fallback_correction.choices import require_choice
from fallback_correction.mismatch_metrics import CLAMP
from fallback_correction.ratios import clamped
from fallback_correction.rejection import divergence
from fallback_correction.tokens import TokenBatch

Metrics = dict[str, float]


def token_mean(batch: TokenBatch, values: Tensor) -> float:
    """Average [N] over the counting tokens; conditions work too."""
    return (batch.sums(values).sum() / batch.counts.sum()).item()


def sequence_mean(values: Tensor) -> float:
    """Average [S]; conditions work too."""
    return values.double().mean().item()


def std(values: Tensor) -> float:
    """Return the sample standard deviation of [S], 0 for a single value."""
    return values.std().item() if len(values) > 1 else 0.0


def token_std(batch: TokenBatch, values: Tensor) -> float:
    """Return the population standard deviation over the counting tokens."""
    values = values.double()
    return math.sqrt(max(token_mean(batch, values**2) - token_mean(batch, values) ** 2, 0.0))


def mismatch(batch: TokenBatch, r: Tensor) -> Metrics:
    """Return metrics of the policies' mismatch, with or without a correction."""
    train, rollout = batch.means(batch.train_log_probs), batch.means(batch.rollout_log_probs)
    difference = rollout - train
    return {
        "training_ppl": sequence_mean(torch.exp(-train)),
        "training_log_ppl": sequence_mean(-train),
        "kl": token_mean(batch, -r),
        "k3_kl": token_mean(batch, divergence(r, "k3")),
        "rollout_ppl": sequence_mean(torch.exp(-rollout)),
        "rollout_log_ppl": sequence_mean(-rollout),
        "log_ppl_diff": sequence_mean(difference),
        "log_ppl_abs_diff": sequence_mean(difference.abs()),
        "log_ppl_diff_max": difference.max().item(),
        "log_ppl_diff_min": difference.min().item(),
        "ppl_ratio": sequence_mean(torch.exp(difference)),
        "chi2_token": token_mean(batch, torch.exp(2 * clamped(r.double(), CLAMP))) - 1,
        "chi2_seq": sequence_mean(torch.exp(2 * clamped(batch.sums(r), CLAMP))) - 1,
    }


def importance(
    batch: TokenBatch,
    level: Level,
    r: Tensor,
    raw: Tensor,
    applied: Tensor,
    bounds: tuple[float, float],
) -> Metrics:
    """Return metrics of the weights [N] before any bound (raw) and before normalisation (applied).

    bounds: the thresholds of fractions; without a lower bound verl takes 1 / upper.
    """
    require_choice("level", level, Level)
    upper = bounds[1]
    limited = applied.clamp(max=upper).double()
    squares = token_mean(batch, (limited / (token_mean(batch, limited) + 1e-8)) ** 2)
    of_tokens = _range_of_tokens(batch, raw, applied, bounds)
    return {
        "rollout_is_mean": token_mean(batch, applied),
        "rollout_is_std": token_std(batch, limited),
        "rollout_is_eff_sample_size": 1 / squares if squares else 0.0,
        **(of_tokens if level == "token" else _range_of_sequences(batch.sums(r), bounds)),
        **_means_of_sequences(batch.means(raw), batch.means(applied), bounds),
    }


def _range_of_tokens(
    batch: TokenBatch, raw: Tensor, applied: Tensor, bounds: tuple[float, float]
) -> Metrics:
    return {
        "rollout_is_max": batch.maxima(applied).max().item(),
        "rollout_is_min": -batch.maxima(-applied).max().item(),
        "rollout_is_ratio_fraction_high": token_mean(batch, raw > bounds[1]),
        "rollout_is_ratio_fraction_low": token_mean(batch, raw < bounds[0]),
    }


def _range_of_sequences(logs: Tensor, bounds: tuple[float, float]) -> Metrics:
    """Return the range of the products exp(logs), which are not bounded."""
    return {
        "rollout_is_max": math.exp(min(logs.max().item(), CLAMP)),
        "rollout_is_min": logs.min().exp().item(),
        "rollout_is_ratio_fraction_high": sequence_mean(logs > log(bounds[1])),
        "rollout_is_ratio_fraction_low": sequence_mean(logs < log(bounds[0])),
    }


def _means_of_sequences(raw: Tensor, applied: Tensor, bounds: tuple[float, float]) -> Metrics:
    return {
        "rollout_is_seq_mean": sequence_mean(applied),
        "rollout_is_seq_std": std(applied),
        "rollout_is_seq_max": applied.max().item(),
        "rollout_is_seq_min": applied.min().item(),
        "rollout_is_seq_max_deviation": (applied - 1).abs().max().item(),
        "rollout_is_seq_fraction_high": sequence_mean(raw > bounds[1]),
        "rollout_is_seq_fraction_low": sequence_mean(raw < bounds[0]),
    }


def rejection(batch: TokenBatch, option: RejectionOption, values: Tensor, keep: Tensor) -> Metrics:
    """Return metrics of one option's statistic, [N], and its kept tokens, bool [N].

    `seq_*` are over the sequences with a counting token: of their statistic, or of the mean over their
    tokens for a token option.
    """
    some = batch.counts > 0
    of_tokens = option.aggregation == "token"
    sequences = (batch.means if of_tokens else batch.maxima)(values)[some]
    low, high = values < option.lower, values > option.upper
    seq_low, seq_high = sequences < option.lower, sequences > option.upper
    limited = values.clamp(option.lower if option.two_sided else 0.0, option.upper)
    metrics = {
        "mean": token_mean(batch, values),
        "max": batch.maxima(values).max().item(),
        "min": -batch.maxima(-values).max().item(),
        "std": token_std(batch, limited),
        "fraction_high": token_mean(batch, high) if of_tokens else sequence_mean(seq_high),
        "fraction_low": token_mean(batch, low) if of_tokens else sequence_mean(seq_low),
        "seq_mean": sequence_mean(sequences),
        "seq_std": std(sequences),
        "seq_max": sequences.max().item(),
        "seq_min": sequences.min().item(),
        "seq_max_deviation": sequences.abs().max().item(),
        "seq_fraction_high": sequence_mean(seq_high),
        "masked_fraction": token_mean(batch, ~keep),
        "seq_masked_fraction": sequence_mean((batch.sums(~keep) > 0)[some]),
    }
    if option.two_sided:
        metrics["seq_fraction_low"] = sequence_mean(seq_low)
    return {f"rollout_rs_{option.name}_{name}": value for name, value in metrics.items()}
