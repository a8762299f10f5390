"""Masked importance sampling of Miles and slime: drop-ins for the functions in their `mis.py`.

Start Miles or slime with `--custom-config-path mis.yaml` and

    --custom-tis-function-path fallback_correction.adapters.miles.compute_mis_weights_with_cp

Keys: use_tis use_rs tis_level rs_level tis_mode tis_lower_bound tis_upper_bound rs_lower_bound
rs_upper_bound rs_veto_threshold tis_batch_normalize, and two of ours, `mis_fixed` and `rs_rules`.
Without them the results equal Miles', including these mistakes; with `mis_fixed: true`

1. weights are normalised over the global batch, where Miles takes the micro-batch of one rank. The
   means are over the values of one call that `gather` gathers: within Miles' hook still a micro-batch
   (of all data-parallel ranks, if a `gather` over them is passed and all call equally often). Call
   `compute_mis_weights` with the whole step to cover all of it;
2. `tis_level: geometric` can be normalised, which in Miles raises ValueError;
3. `use_rs` and
4. `rs_veto_threshold` work without `use_tis`, and the veto without `use_rs`. Miles calls the hook
   without `--use-tis` only if `--get-mismatch-metrics` is given;
5. rejected tokens have the weight 0 and do not enter the mean that normalises weights, where in Miles
   one rejected weight of e^20 makes all others vanish. The denominator of the loss is outside the
   hook: Miles counts rejected tokens there, although its README says otherwise;
6. what Miles lacks: `tis_level: prefix-min` (MinPRO), tis_level or rs_level `turn` and `turn-geometric`,
   whose turns are the runs of a sample's loss mask, `tis_mode: taper` (TOPR), and
   `rs_rules: [token_binary_kl=0.1]` (KPop) or other rules in place of rs_level and its bounds.

Miles gives the hook the log-probabilities of sampled tokens in one micro-batch: score centering, TRM's
exact maximum (`seq_max_kl`) and VCPO's learning rate are beyond it.

With context parallelism the hook needs to know which tokens a rank holds. For Miles:

    def tis(args, **given):
        cp = given["parallel_state"].cp
        shard = miles.zigzag_shard(
            given["total_lengths"], given["response_lengths"], cp.rank, cp.size, cp.group,
            device=given["pg_loss"].device,
        )
        return miles.compute_mis_weights_with_cp(args, **given, context_shard=shard)

slime has rank, size and group in `megatron.core.mpu.get_context_parallel_*`.

Metrics have one value a token, which Miles averages with its own reducer: a sequence's value stands at
each of its tokens. Values outside the mask are undefined, and Miles' reducer leaves them out.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fallback_correction.adapters.miles.context import Shard
from fallback_correction.config import (
    BY_TOKEN,
    CorrectionConfig,
    CorrectionSettings,
    Veto,
    WeightLevel,
)
from fallback_correction.correction import SMALLEST_MEAN, apply_veto, correct, divergence
from fallback_correction.mismatch_metrics import CLAMP
from fallback_correction.ranges import require_choice
from fallback_correction.tokens import Gather, TokenBatch, alone, clamped, level_log_ratios

TokenMetrics = dict[str, Tensor]

MILES = ("token", "sequence", "geometric", "truncate", "clip", "mask")
"""Levels and modes that Miles has."""

Applied = tuple[Tensor | None, Tensor, TokenMetrics]
"""Weights float32 [N] or None, tokens to train on bool [N], metrics."""


def compute_mis_weights_with_cp(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    context_shard: Shard | None = None,
    gather: Gather = alone,
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Return pg_loss times weights, masks for the loss, and flat metrics `mis_*`: the hook itself.

    context_shard: a `ContextShard` or a similar object, if log-probabilities and pg_loss (one value for
    each token) hold only the tokens of a context-parallel rank; otherwise the tensors are whole.
    loss_masks and the returned masks are whole in either case. total_lengths and the other arguments of
    Miles and slime (`kwargs`) are unused. Raises as `compute_mis_weights` does.
    """
    if context_shard is not None:
        train_log_probs = _whole(context_shard, train_log_probs, response_lengths)
        rollout_log_probs = _whole(context_shard, rollout_log_probs, response_lengths)
    weights, masks, metrics = compute_mis_weights(
        args,
        train_log_probs=train_log_probs,
        rollout_log_probs=rollout_log_probs,
        loss_masks=loss_masks,
        gather=gather,
        advantages=_signs(args, pg_loss, context_shard),
    )

    def held(values: list[Tensor]) -> Tensor:
        return _joined(values) if context_shard is None else context_shard.take(_joined(values))

    if weights is not None:
        pg_loss = pg_loss * held(weights).to(pg_loss.device)
    return pg_loss, masks, {f"mis_{name}": held(values) for name, values in metrics.items()}


@torch.no_grad()
def compute_mis_weights(
    args: Any,
    *,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    gather: Gather = alone,
    advantages: Tensor | None = None,
) -> tuple[list[Tensor] | None, list[Tensor], dict[str, list[Tensor]]]:
    """Return weights, masks and metrics of whole sequences; lists of one 1-D tensor a sequence.

    args: any object with the keys above as attributes. Log-probabilities in nats, masks of 0 and 1;
    gather: over the data-parallel ranks, used with `mis_fixed` only. advantages: of all tokens, float32
    [N], or numbers of their signs, for mode taper. Returns float32 weights (None without use_tis; 0
    outside the loss mask), float32 masks (`loss_masks` itself where Miles does nothing), and the metrics
    of Miles' README without `mis_`, per token; all without gradient.

    Raises ValueError for bad keys, for lists of different shapes, and, with mis_fixed, for
    log-probabilities that are not finite.
    """
    settings, fixed = read_keys(args), bool(getattr(args, "mis_fixed", False))
    batch = _packed(train_log_probs, rollout_log_probs, loss_masks).with_turns()
    lengths: list[int] = batch.lengths.tolist()
    if not (settings.use_tis or fixed):
        return None, loss_masks, _split_all(mismatch_token_metrics(batch), lengths)
    applied = _fixed(settings, batch, gather, advantages) if fixed else _as_miles(settings, batch)
    weights, kept, metrics = applied
    return (
        None if weights is None else _split(weights, lengths),
        _split(kept.float(), lengths),
        _split_all(mismatch_token_metrics(batch) | metrics, lengths),
    )


def _signs(args: Any, pg_loss: Tensor, shard: Shard | None) -> Tensor | None:
    """Return numbers with the signs of the advantages A, which the hook is not given, for mode taper:
    pg_loss is -A times a ratio."""
    if getattr(args, "tis_mode", None) != "taper":
        return None
    if getattr(args, "advantage_estimator", None) == "cispo":
        raise ValueError(
            "tis_mode=taper: needs the signs of the advantages, and the loss of "
            "advantage_estimator=cispo has a log-probability for a factor. Use mode truncate."
        )
    return -(pg_loss.detach() if shard is None else shard.gather(pg_loss.detach().float()))


def _fixed(
    settings: CorrectionSettings, batch: TokenBatch, gather: Gather, advantages: Tensor | None
) -> Applied:
    """Return the correction that the keys describe, with Miles' metrics."""
    correction = correct(batch, settings.correction(), gather, advantages)
    weights, kept = correction.weights, correction.mask
    metrics: TokenMetrics = {}
    if weights is not None:
        bounded, metrics = _bounded(settings, batch, advantages)
        metrics["is_ratio_mean_after_tis_rs"] = torch.where(kept, bounded, 0)
        if settings.tis_batch_normalize:
            factor = correction.metrics["correction/batch_norm_factor"]
            metrics["batch_norm_factor"] = torch.full_like(bounded, _divisor(factor))
        metrics |= final_metrics(dataclasses.replace(batch, mask=kept), weights)
    if settings.use_rs and not settings.rs_rules:
        metrics |= rejection_metrics(settings, ratios(batch, settings.rs_level))
    if settings.rs_veto_threshold is not None:
        metrics |= veto_metrics(batch, settings.rs_veto_threshold)
    return weights, kept, metrics


def _as_miles(settings: CorrectionSettings, batch: TokenBatch) -> Applied:
    for name in ("tis_level", "rs_level", "tis_mode", "rs_rules"):
        if (value := getattr(settings, name)) not in (*MILES, ()):
            raise ValueError(
                f"{name}={value!r}: Miles has no such correction, and without mis_fixed the results are "
                "Miles'. Set mis_fixed=True."
            )
    weights, metrics = _bounded(settings, batch)
    kept = batch.mask
    if settings.tis_mode == "mask":
        kept = kept & _inside(weights, settings.weight_bounds)
    if settings.use_rs:
        values = ratios(batch, settings.rs_level)
        metrics |= rejection_metrics(settings, values)
        kept = kept & _inside(values, settings.rejection_bounds)
    if settings.use_rs and settings.rs_veto_threshold is not None:
        metrics |= veto_metrics(batch, settings.rs_veto_threshold)
        kept = kept & (metrics["rs_catastrophic_seq_fraction"] == 0)
    metrics["is_ratio_mean_after_tis_rs"] = weights
    if settings.tis_batch_normalize:
        factor = _divisor(_mean_of_call(settings, batch, weights))
        metrics["batch_norm_factor"] = torch.full_like(weights, factor)
        weights = weights / factor
    return weights, kept, metrics | final_metrics(batch, weights)


def _bounded(
    settings: CorrectionSettings, batch: TokenBatch, advantages: Tensor | None = None
) -> tuple[Tensor, TokenMetrics]:
    """Return bounded weights, or unbounded ones in mode mask: float32 [N], 0 outside the mask."""
    raw = bounded = ratios(batch, settings.tis_level)
    if settings.tis_mode in ("truncate", "taper"):
        bounded = raw.clamp(max=settings.tis_upper_bound)
        if advantages is not None:
            bounded = bounded.masked_fill(advantages >= 0, 1)
    elif settings.tis_mode == "clip":
        bounded = raw.clamp(*settings.weight_bounds)
    bounded = torch.where(batch.mask, bounded, 0)
    return bounded, bound_metrics(settings, raw, bounded)


def _inside(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (values >= bounds[0]) & (values <= bounds[1])


def _divisor(mean: float) -> float:
    """Return the divisor that normalises weights with this mean."""
    return mean if mean > SMALLEST_MEAN else 1.0


def _mean_of_call(settings: CorrectionSettings, batch: TokenBatch, weights: Tensor) -> float:
    """Return Miles' mean: rejected weights count, and a sequence without a token counts as 0."""
    if "geometric" in settings.tis_level:
        raise ValueError(
            f"tis_batch_normalize=True: Miles cannot normalise weights of tis_level="
            f"{settings.tis_level!r}. Set mis_fixed=True, which can, or take another level."
        )
    if settings.tis_level == "token":
        return (batch.sums(weights).sum() / batch.counts.sum().clamp(min=1)).item()
    return (batch.means(weights).sum() / max(len(batch.lengths), 1)).item()


def _packed(train: list[Tensor], rollout: list[Tensor], masks: list[Tensor]) -> TokenBatch:
    shapes = zip_longest(*([tuple(x.shape) for x in values] for values in (train, rollout, masks)))
    for i, (a, b, c) in enumerate(shapes):
        if not a == b == c or len(a) != 1:
            raise ValueError(
                f"train_log_probs={a}, rollout_log_probs={b}, loss_masks={c}, the shapes of sequence "
                f"{i}: must be the same [T]. With context parallelism, pass a context_shard."
            )
    return TokenBatch.packed(
        _joined(train), _joined(rollout), [len(x) for x in train], _joined(masks)
    )


def _whole(shard: Shard, values: list[Tensor], lengths: list[int]) -> list[Tensor]:
    return _split(shard.gather(_joined(values).detach().float()), lengths)


def _joined(values: list[Tensor]) -> Tensor:
    return torch.cat(values) if values else torch.zeros(0)


def _split(values: Tensor, lengths: list[int]) -> list[Tensor]:
    return list(values.split(lengths)) if lengths else []


def _split_all(metrics: TokenMetrics, lengths: list[int]) -> dict[str, list[Tensor]]:
    return {name: _split(values, lengths) for name, values in metrics.items()}


def read_keys(args: Any) -> CorrectionSettings:
    """Read the keys; a key that `args` lacks has its default in Miles (`MisConfig` in its mis.py).

    Bounds with a fallback in Miles are filled in: tis_lower_bound by 1 / tis_upper_bound, rs_*_bound by
    the tis bound of that side. A bound of 0 is a bound. Raises ValueError for an invalid value.
    """
    use_tis, use_rs = (bool(getattr(args, name, False)) for name in ("use_tis", "use_rs"))
    mode: Any = getattr(args, "tis_mode", "truncate")
    upper = _number(args, "tis_upper_bound", 2.0)
    if upper is None or not upper > 0:
        raise ValueError(f"tis_upper_bound={upper}: must be greater than 0. Miles' default is 2.0.")
    lower = _or(_number(args, "tis_lower_bound", 0.5), 1 / upper)
    rs_lower = _or(_number(args, "rs_lower_bound", None), lower)
    rs_upper = _or(_number(args, "rs_upper_bound", None), upper)
    if use_tis and mode in ("clip", "mask"):
        _require_order("tis", lower, upper)
    if use_rs:
        _require_order("rs", rs_lower, rs_upper)
    return CorrectionSettings(
        use_tis=use_tis,
        tis_level=getattr(args, "tis_level", "token"),
        tis_mode=mode,
        # Truncation has no lower bound, and the one that it falls back to may exceed the upper one.
        tis_lower_bound=min(lower, upper),
        tis_upper_bound=upper,
        tis_batch_normalize=bool(getattr(args, "tis_batch_normalize", False)),
        use_rs=use_rs,
        rs_level=getattr(args, "rs_level", "token"),
        rs_lower_bound=rs_lower if use_rs else None,
        rs_upper_bound=rs_upper if use_rs else None,
        rs_rules=_rules(args),
        rs_veto_threshold=_number(args, "rs_veto_threshold", 1e-4),
        rejected_in_denominator=False,
    )


def correction_config(args: Any) -> CorrectionConfig:
    """Return the keys' correction under `mis_fixed`, set or not. Raises ValueError for bad keys."""
    return read_keys(args).correction()


def _rules(args: Any) -> tuple[str, ...]:
    rules = getattr(args, "rs_rules", None) or ()
    rules = tuple(rules.split() if isinstance(rules, str) else rules)
    if rules and not getattr(args, "use_rs", False):
        raise ValueError(
            f"rs_rules={rules}: only use_rs reads it. Set use_rs=True, or leave it out."
        )
    if any(rule.startswith("seq_max_kl") for rule in rules):
        raise ValueError(
            f"rs_rules={rules}: seq_max_kl needs whole distributions, and Miles gives its hook "
            "log-probabilities of the sampled tokens alone. Use seq_max_k3, which estimates it."
        )
    return rules


def _number(args: Any, name: str, default: float | None) -> float | None:
    value = getattr(args, name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(
            f"{name}={value!r}: must be a number. In YAML write 1.0e-4, since 1e-4 is a string there."
        )
    if value < 0:
        raise ValueError(f"{name}={value}: a bound of a ratio is at least 0. Use 0 for no bound.")
    return float(value)


def _or(value: float | None, fallback: float) -> float:
    return fallback if value is None else value


def _require_order(prefix: str, lower: float, upper: float) -> None:
    if not lower <= upper:
        raise ValueError(
            f"{prefix}_lower_bound={lower}, {prefix}_upper_bound={upper}: the lower bound must not "
            "exceed the upper one. Null bounds fall back to the tis bounds and 1 / tis_upper_bound."
        )


def ratios(batch: TokenBatch, level: WeightLevel) -> Tensor:
    """Return rho > 0 of every token or its sequence, log rho clamped to +- 20: float32 [N]."""
    require_choice("level", level, WeightLevel)
    r = batch.train_log_probs - batch.rollout_log_probs
    if level in BY_TOKEN:
        return torch.exp(clamped(level_log_ratios(batch, r, level), CLAMP))
    batch = batch.by_turn(level)
    logs = batch.sums(r) if level in ("sequence", "turn") else batch.means(r)
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
    """Return statistics of the final weights over each sequence's tokens; 0 where it has none."""
    some = batch.counts > 0
    of_sequences = {
        "is_ratio_mean_final": batch.means(weights),
        "is_ratio_min_final": torch.where(some, -batch.maxima(-weights), 0),
        "is_ratio_max_final": torch.where(some, batch.maxima(weights), 0),
    }
    return {name: batch.spread(x).float() for name, x in of_sequences.items()}
