"""verl's rollout correction: `verl/trainer/ppo/rollout_corr_helper.py` on plain tensors.

Keys: rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold;
named presets: `PRESETS`. verl lacks `rollout_rs: binary_kl` (KPop), `rollout_is: prefix-min` (MinPRO),
`geometric`, `turn` and `turn-geometric`, whose turns are the runs of response_mask, and
`rollout_is_taper: true` (TOPR). With verl's own keys results equal verl's, so

- bounds of `*_k1` options apply to 1 / rho = pi_rollout / pi_train, of rollout_is_threshold to rho;
- the mask rejects and weights do not: a rejected token keeps its weight, one that IcePop zeroes stays
  in the mask, and weights are normalised before rejection;
- the denominator of a loss over the returned mask leaves rejected tokens out (decoupled mode).

Unlike verl, which all-reduces over the default group wherever torch.distributed is initialised, this
communicates with other ranks only through `gather`.

Metrics are scalars over the batch of the call. Where verl averages over sequences, one without a
counting token enters as 0 unless a comment says otherwise. Only `compute_rollout_correction` adds verl's
prefix `rollout_corr/` to their names.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fallback_correction.adapters.verl.thresholds import (
    Level,
    LossType,
    RejectionOption,
    importance_bounds,
    log,
    rejection_options,
)
from fallback_correction.config import CorrectionConfig
from fallback_correction.correction import (
    SMALLEST_MEAN,
    binary_kl,
    divergence,
    importance_weights,
    mean_weight,
    tapered,
)
from fallback_correction.mismatch_metrics import CLAMP
from fallback_correction.ranges import require_choice
from fallback_correction.tokens import Gather, TokenBatch, alone, clamped, log_ratios

Metrics = dict[str, float]


@torch.no_grad()
def compute_rollout_correction(
    config: Any,
    *,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    gather: Gather = alone,
    advantages: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Metrics]:
    """Return weights, the mask after rejection, and metrics named `rollout_corr/*`, without gradient.

    config: a mapping or any object with verl's keys; a missing key has verl's default, which is no
    correction. Tensors [B, T], log-probabilities in nats. gather: over data-parallel ranks, for the
    mean of rollout_is_batch_normalize. advantages: [B, T], for rollout_is_taper. Weights are float32
    and 0 outside response_mask, or None; the mask has the dtype of response_mask.

    Raises ValueError for bad keys, shapes that differ, or a response_mask without a token.
    """
    if _get(config, "loss_type") == "centered":
        raise ValueError(
            "loss_type=centered: score centering needs the engine's log-probabilities of its likeliest "
            "tokens, which verl does not keep. Use reinforce, or keep them and call "
            "fallback_correction.score_centering in a loss of your own."
        )
    require_choice("loss_type", _get(config, "loss_type", "ppo_clip"), LossType)
    _require_same_shapes(old_log_prob, rollout_log_prob, response_mask)
    batch = TokenBatch.padded(old_log_prob, rollout_log_prob, response_mask).with_turns()
    r = log_ratios(batch)
    weights: Tensor | None = None
    metrics: Metrics = {}
    if _get(config, "rollout_is_taper") and (
        _get(config, "rollout_is") is None or "_" in str(_get(config, "rollout_is_threshold", 2.0))
    ):
        raise ValueError(
            f"rollout_is_taper=True: truncates weights, and rollout_is={_get(config, 'rollout_is')!r}, "
            f"rollout_is_threshold={_get(config, 'rollout_is_threshold')!r}. Give a level and one bound."
        )
    if (
        _get(config, "rollout_is") is not None
        and _get(config, "rollout_is_threshold", 2.0) is not None
    ):
        weights, metrics = _importance(config, batch, r, gather, advantages)
        weights = weights.view(response_mask.shape)
    keep = torch.ones_like(batch.mask)
    if _get(config, "rollout_rs") is not None:
        keep, rejections = _rejection(config, batch, r)
        metrics |= rejections
    metrics |= mismatch(batch, r)
    mask = response_mask * keep.view(response_mask.shape).to(response_mask.dtype)
    return weights, mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _importance(
    config: Any, batch: TokenBatch, r: Tensor, gather: Gather, advantages: Tensor | None
) -> tuple[Tensor, Metrics]:
    level = _get(config, "rollout_is")
    require_choice("rollout_is", level, Level)
    lower, upper = importance_bounds(_get(config, "rollout_is_threshold", 2.0))
    core = CorrectionConfig(level=level, lower=lower or 0.0, upper=upper, log_ratio_clamp=CLAMP)
    found = importance_weights(batch, r, core)
    if _get(config, "rollout_is_taper", False):
        found = tapered(batch, found, None if advantages is None else advantages.reshape(-1))
    weights = found.bounded
    metrics: Metrics = {}
    if lower is not None:
        outside = found.too_low | found.too_high
        weights = torch.where(outside, 0, found.raw)
        metrics["rollout_is_oob_ratio"] = token_mean(batch, outside)
    bounds = (1 / upper if lower is None else lower, upper)
    metrics |= importance(batch, level, r, found.raw, weights, bounds)
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
        metrics |= rejection(batch, option, values, keep)
        all_keep = all_keep & keep
    metrics["rollout_rs_masked_fraction"] = token_mean(batch, ~all_keep)
    metrics["rollout_rs_seq_masked_fraction"] = sequence_mean(batch.sums(~all_keep) > 0)
    return all_keep, metrics


def _statistic(batch: TokenBatch, r: Tensor, option: RejectionOption) -> Tensor:
    """Return an option's statistic of log-ratios clamped to +- 20, [N]; a sequence's at each token."""
    if option.statistic == "binary_kl":
        return binary_kl(batch)
    values = divergence(clamped(r, CLAMP), option.statistic)
    if option.aggregation == "token":
        return values
    of_sequences = {"sum": batch.sums, "mean": batch.means, "max": batch.maxima}
    return batch.spread(of_sequences[option.aggregation](values))


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
        **(of_tokens if level != "sequence" else _range_of_sequences(batch.sums(r), bounds)),
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


def token_mean(batch: TokenBatch, values: Tensor) -> float:
    """Average [N] over the counting tokens; conditions work too."""
    return (batch.sums(values).sum() / batch.counts.sum()).item()


def token_std(batch: TokenBatch, values: Tensor) -> float:
    """Return the population standard deviation over the counting tokens."""
    values = values.double()
    return math.sqrt(max(token_mean(batch, values**2) - token_mean(batch, values) ** 2, 0.0))


def sequence_mean(values: Tensor) -> float:
    """Average [S]; conditions work too."""
    return values.double().mean().item()


def std(values: Tensor) -> float:
    """Return the sample standard deviation of [S], 0 for a single value."""
    return values.std().item() if len(values) > 1 else 0.0
