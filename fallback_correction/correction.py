"""Correction of a batch in one call: weights, kept tokens, and metrics of the rest.

Importance weights are made from log-ratios, bounded, and optionally self-normalised; tokens and
sequences whose mismatch is too large to train on are rejected.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fallback_correction.config import CorrectionConfig, RejectionRule, Veto
from fallback_correction.ranges import require_choice
from fallback_correction.tokens import (
    Gather,
    NonfiniteError,
    TokenBatch,
    alone,
    clamped,
    exact_sum,
    global_token_mean,
    level_log_ratios,
    log_ratios,
    without_nonfinite,
)

Metrics = dict[str, float]

LARGEST = torch.finfo(torch.float32).max
"""Value that metrics report for a weight beyond float32, such as exp of a log-ratio above 88.7 without
a clamp."""

SMALLEST_MEAN = 1e-8
"""Smallest mean by which weights are normalised, as in Miles and verl."""


@torch.no_grad()
def correct(
    batch: TokenBatch,
    config: CorrectionConfig,
    gather: Gather = alone,
    advantages: Tensor | None = None,
) -> Correction:
    """Correct the part of a global batch that this rank holds.

    With w the bounded weight of a token, K the kept tokens, and m their mean weight (see
    `CorrectionConfig.self_normalize`; 1 without it, and where it is below 1e-8), the token has the
    weight w / m in K and 0 elsewhere. Weights and metrics are the same to the last bit for any order of
    the batch and any number of ranks. advantages: float32 [N], for mode taper. Raises ValueError for a
    log-probability that is not finite (see `CorrectionConfig.nonfinite`), and for a kept token with a
    weight beyond float32.
    """
    finite = without_nonfinite(batch, config)
    r = log_ratios(finite)
    metrics = {"correction/nonfinite_fraction": _fraction(batch, batch.mask & ~finite.mask, gather)}
    kept, rejections = _reject(finite, r, config, gather)
    metrics |= rejections
    centered, weights = kept, None
    if config.has_weights:
        bounds = importance_weights(finite, r, config)
        if config.mode == "taper":
            bounds = tapered(finite, bounds, advantages)
        metrics |= _bound_metrics(finite, bounds, config, gather)
        if config.mode == "mask":
            kept = kept & ~(bounds.too_low | bounds.too_high)
        left = dataclasses.replace(batch, mask=kept)
        weights, factor = _normalized(left, bounds.bounded, config, gather)
        metrics["correction/batch_norm_factor"] = factor
        metrics |= _weight_metrics(left, weights, "", gather)
    metrics["correction/rejected_fraction"] = _fraction(batch, batch.mask & ~kept, gather)
    counted = batch.mask if config.rejected_in_denominator else kept
    return Correction(
        weights=weights, mask=kept, centered=centered, counted=counted, metrics=metrics
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The weights and masks of a batch's tokens in the loss, without gradient."""

    weights: Tensor | None
    """Factor of each token's loss, float32 [N], 0 outside `mask`; None without weights."""

    mask: Tensor
    """Tokens to train on, bool [N], a part of the batch's own mask."""

    centered: Tensor
    """Tokens that score centering is over, bool [N]: these and those that mode mask left out, whose
    weight of 0 is a part of its mean."""

    counted: Tensor
    """Tokens that the denominators of the loss count, bool [N]."""

    metrics: Metrics
    """Metrics `correction/*`, over the global batch; equal on all ranks."""


def _reject(
    batch: TokenBatch, r: Tensor, config: CorrectionConfig, gather: Gather
) -> tuple[Tensor, Metrics]:
    """Return the tokens that all rules and the veto keep, each applied to the whole batch, and
    metrics."""
    kept, metrics = batch.mask, {}
    low, high = torch.zeros_like(kept), torch.zeros_like(kept)
    for rule in config.rules:
        rejected = apply_rule(batch, r, rule, config.log_ratio_clamp)
        kept = kept & ~rejected.either
        low, high = low | rejected.low, high | rejected.high
    if config.rules:
        metrics["correction/rejected_low_fraction"] = _fraction(batch, low, gather)
        metrics["correction/rejected_high_fraction"] = _fraction(batch, high, gather)
    if config.veto is not None:
        tokens, sequences = apply_veto(batch, r, config.veto)
        kept = kept & ~sequences
        metrics["correction/veto_token_fraction"] = _fraction(batch, tokens, gather)
        metrics["correction/veto_sequence_fraction"] = _sequence_fraction(batch, sequences, gather)
    return kept, metrics


def _normalized(
    left: TokenBatch, weights: Tensor, config: CorrectionConfig, gather: Gather
) -> tuple[Tensor, float]:
    """Return the weights of kept tokens divided by their global mean, 0 elsewhere, and that mean."""
    weights = torch.where(left.mask, weights, 0)
    _require_finite(weights, config)
    if not config.self_normalize:
        return weights, 1.0
    mean = mean_weight(left, weights, config, gather)
    return (weights / mean if mean > SMALLEST_MEAN else weights), mean


def _require_finite(weights: Tensor, config: CorrectionConfig) -> None:
    """Raise ValueError, naming the first token, if a bounded weight is beyond float32."""
    beyond = torch.isinf(weights)
    if beyond.any():
        raise NonfiniteError(
            f"log_ratio_clamp={config.log_ratio_clamp}, upper={config.upper}: token "
            f"{int(beyond.nonzero()[0])}, one of {int(beyond.sum())}, has a weight of more than "
            f"{LARGEST:.3g}, and float32 holds none larger. Give log_ratio_clamp "
            "or a finite upper."
        )


def _bound_metrics(
    batch: TokenBatch, weights: Weights, config: CorrectionConfig, gather: Gather
) -> Metrics:
    low, high = (_fraction(batch, side, gather) for side in (weights.too_low, weights.too_high))
    metrics = _weight_metrics(batch, weights.raw.clamp(max=LARGEST), "_before", gather)
    if config.mode in ("truncate", "taper"):
        return {**metrics, "correction/truncated_fraction": high}
    name = "clipped" if config.mode == "clip" else "masked"
    return {
        **metrics,
        f"correction/{name}_low_fraction": low,
        f"correction/{name}_high_fraction": high,
    }


def _weight_metrics(batch: TokenBatch, weights: Tensor, suffix: str, gather: Gather) -> Metrics:
    some = batch.counts > 0
    largest, smallest = gather(batch.maxima(weights)[some]), gather(batch.maxima(-weights)[some])
    return {
        f"correction/weight_mean{suffix}": global_token_mean(batch, weights, gather),
        f"correction/weight_max{suffix}": largest.max().item() if len(largest) else 0.0,
        f"correction/weight_min{suffix}": -smallest.max().item() if len(smallest) else 0.0,
    }


def _fraction(batch: TokenBatch, condition: Tensor, gather: Gather) -> float:
    return global_token_mean(batch, condition.float(), gather)


def _sequence_fraction(batch: TokenBatch, condition: Tensor, gather: Gather) -> float:
    some = (batch.counts > 0).double()
    hit = (batch.sums(condition.float()) > 0).double()
    count = exact_sum(gather(some))
    return exact_sum(gather(hit)) / count if count else 0.0


def importance_weights(batch: TokenBatch, r: Tensor, config: CorrectionConfig) -> Weights:
    """Compute weights at `config.level`, bounded by `config.mode`; a weight equal to a bound is inside.

    r: float32 [N]. Truncation: Espeholt et al. 2018 (arXiv 1802.01561); masking: IcePop, MIS.
    """
    log_weights = level_log_ratios(batch, r, config.level)
    raw = torch.exp(clamped(log_weights, config.log_ratio_clamp))
    raw = torch.where(batch.mask, raw, 0)
    return Weights(
        raw=raw,
        bounded=torch.where(batch.mask, bounded(raw, config), 0),
        too_low=batch.mask & (raw < config.lower),
        too_high=batch.mask & (raw > config.upper),
    )


def tapered(batch: TokenBatch, weights: Weights, advantages: Tensor | None) -> Weights:
    """Return weights of 1 for tokens whose advantage, float32 [N], is not negative (TOPR, arXiv
    2503.14286). Raises ValueError without advantages."""
    if advantages is None:
        raise ValueError("mode=taper: needs the advantages of the tokens. Give `advantages`.")
    is_kept_whole = batch.mask & (advantages >= 0)
    return dataclasses.replace(
        weights,
        bounded=weights.bounded.masked_fill(is_kept_whole, 1),
        too_high=weights.too_high & ~is_kept_whole,
    )


def bounded(raw: Tensor, config: CorrectionConfig) -> Tensor:
    """Bound weights by `config.mode`; `mask` changes none, since it rejects instead."""
    if config.mode in ("truncate", "taper"):
        return raw.clamp(max=config.upper)
    return raw.clamp(config.lower, config.upper) if config.mode == "clip" else raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of a batch. All [N]; `raw` and `bounded` are float32 and 0 outside the mask."""

    raw: Tensor
    bounded: Tensor

    too_low: Tensor
    too_high: Tensor
    """Tokens whose raw weight is above the upper bound, bool; `too_low`: below the lower one."""


def mean_weight(
    batch: TokenBatch, weights: Tensor, config: CorrectionConfig, gather: Gather
) -> float:
    """Return the mean weight of the global batch: over tokens, sequences or turns, by the level.

    Those without a counting token take no part. The bits are the same for any split and order.
    """
    batch = batch.by_turn(config.level)
    sums, counts = batch.sums(weights), batch.counts
    if not config.weighs_tokens:
        sums, counts = sums / counts.clamp(min=1), (counts > 0).double()
    total, count = exact_sum(gather(sums)), exact_sum(gather(counts))
    return total / count if count else 1.0


Divergence = Literal["k1", "k2", "k3"]


def apply_rule(batch: TokenBatch, r: Tensor, rule: RejectionRule, limit: float | None) -> Rejected:
    """Return the tokens that one rule rejects. r: float32 [N]; log-ratios are clamped to +- limit
    before exp."""
    if rule.statistic == "ratio" or rule.statistic == "k1":
        values = torch.exp(clamped(_aggregate_log_ratios(batch, r, rule), limit))
    elif rule.statistic == "binary_kl":
        values = _aggregate(batch, binary_kl(batch), rule)
    elif rule.statistic == "kl":
        values = _aggregate(batch, _known_kl(batch), rule)
    else:
        values = _aggregate(batch, divergence(clamped(r, limit), rule.statistic), rule)
    return Rejected(
        low=batch.mask & ~(values >= rule.lower), high=batch.mask & ~(values <= rule.upper)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The tokens that a rule rejects, bool [N] within the mask, by side."""

    low: Tensor
    """Tokens with too small a rho; for k2 and k3: with a statistic below its lower bound."""

    high: Tensor

    @property
    def either(self) -> Tensor:
        return self.low | self.high


def divergence(r: Tensor, statistic: Divergence) -> Tensor:
    """Compute k1 = -r, k2 = r^2 / 2, k3 = exp(r) - r - 1 (http://joschu.net/blog/kl-approx.html): [N]
    -> [N]."""
    require_choice("statistic", statistic, Divergence)
    if statistic == "k1":
        return -r
    return r.square() / 2 if statistic == "k2" else torch.expm1(r) - r


def binary_kl(batch: TokenBatch) -> Tensor:
    """Return the larger KL between "this token or another" under both policies, in nats: [N].

    KPop (ringtech.notion.site/kpop); AReaL, verl and prime-rl: probabilities at least 1e-6 from 0 and 1.
    """
    p = batch.train_log_probs.double().exp().clamp(1e-6, 1 - 1e-6)
    q = batch.rollout_log_probs.double().exp().clamp(1e-6, 1 - 1e-6)

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))

    return torch.maximum(kl(p, q), kl(q, p)).float()


def _known_kl(batch: TokenBatch) -> Tensor:
    if batch.kl is None:
        raise ValueError(
            "seq_max_kl: needs the KL between whole distributions, and this batch has log-probabilities "
            "of the sampled tokens alone. Give TokenBatch.kl, or use seq_max_k3, which estimates it."
        )
    return batch.kl


def _aggregate_log_ratios(batch: TokenBatch, r: Tensor, rule: RejectionRule) -> Tensor:
    if rule.statistic == "k1" and rule.aggregation == "max":
        return -_aggregate(batch, -r, rule)
    return _aggregate(batch, r, rule)


def _aggregate(batch: TokenBatch, values: Tensor, rule: RejectionRule) -> Tensor:
    if rule.aggregation == "token":
        return values
    batch = batch.by_turn(rule.aggregation)
    of_sequences = {"sum": batch.sums, "mean": batch.means, "max": batch.maxima}
    return batch.spread(of_sequences[rule.aggregation.removeprefix("turn-")](values).float())


def apply_veto(batch: TokenBatch, r: Tensor, veto: Veto) -> tuple[Tensor, Tensor]:
    """Return the tokens beyond the veto's bounds, and all tokens of their sequences: two bool [N]."""
    values = torch.exp(r if veto.by == "ratio" else batch.rollout_log_probs)
    outside = batch.mask & ~((values >= veto.lower) & (values <= veto.upper))
    sequences = batch.spread(batch.sums(outside.float()) > 0)
    return outside, batch.mask & sequences
