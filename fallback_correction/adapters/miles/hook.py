"""Masked importance sampling of Miles and slime: drop-ins for the functions in their `mis.py`.

Start Miles or slime with `--custom-config-path mis.yaml` and

    --custom-tis-function-path fallback_correction.adapters.miles.compute_mis_weights_with_cp

Keys: use_tis use_rs tis_level rs_level tis_mode tis_lower_bound tis_upper_bound rs_lower_bound
rs_upper_bound rs_veto_threshold tis_batch_normalize, and one of ours, `mis_fixed`. Without it the
results equal Miles', including these mistakes; with `mis_fixed: true`

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
   hook: Miles counts rejected tokens there, although its README says otherwise.

With context parallelism the hook needs to know which tokens a rank holds. For Miles:

    def tis(args, **given):
        cp = given["parallel_state"].cp
        shard = miles.zigzag_shard(
            given["total_lengths"], given["response_lengths"], cp.rank, cp.size, cp.group,
            device=given["pg_loss"].device,
        )
        return miles.compute_mis_weights_with_cp(args, **given, context_shard=shard)

slime has rank, size and group in `megatron.core.mpu.get_context_parallel_*`.
"""

from __future__ import annotations

import dataclasses
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fallback_correction.adapters.miles.context import Shard
from fallback_correction.adapters.miles.keys import is_fixed, read_keys
from fallback_correction.adapters.miles.metrics import (
    TokenMetrics,
    bound_metrics,
    final_metrics,
    mismatch_token_metrics,
    ratios,
    rejection_metrics,
    veto_metrics,
)
from fallback_correction.config import CorrectionSettings
from fallback_correction.correction import correct
from fallback_correction.importance_weights import SMALLEST_MEAN
from fallback_correction.tokens import Gather, TokenBatch, alone

Applied = tuple[Tensor | None, Tensor, TokenMetrics]
"""Weights float32 [N] or None, tokens to train on bool [N], metrics."""


@torch.no_grad()
def compute_mis_weights(
    args: Any,
    *,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    gather: Gather = alone,
) -> tuple[list[Tensor] | None, list[Tensor], dict[str, list[Tensor]]]:
    """Return weights, masks and metrics of whole sequences; lists of one 1-D tensor a sequence.

    args: any object with the keys above as attributes. Log-probabilities in nats, masks of 0 and 1;
    gather: over the data-parallel ranks, used with `mis_fixed` only. Returns float32 weights (None
    without use_tis; 0 outside the loss mask), float32 masks (`loss_masks` itself where Miles does
    nothing), and the metrics of Miles' README without `mis_`, per token; all without gradient.

    Raises ValueError for bad keys, for lists of different shapes, and, with mis_fixed, for
    log-probabilities that are not finite.
    """
    settings, fixed = read_keys(args), is_fixed(args)
    batch = _packed(train_log_probs, rollout_log_probs, loss_masks)
    lengths: list[int] = batch.lengths.tolist()
    if not (settings.use_tis or fixed):
        return None, loss_masks, _split_all(mismatch_token_metrics(batch), lengths)
    applied = _fixed(settings, batch, gather) if fixed else _as_miles(settings, batch)
    weights, kept, metrics = applied
    return (
        None if weights is None else _split(weights, lengths),
        _split(kept.float(), lengths),
        _split_all(mismatch_token_metrics(batch) | metrics, lengths),
    )


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
    """Return pg_loss times weights, masks for the loss, and flat metrics named `mis_*`: the hook
    itself.

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
    )

    def held(values: list[Tensor]) -> Tensor:
        return _joined(values) if context_shard is None else context_shard.take(_joined(values))

    if weights is not None:
        pg_loss = pg_loss * held(weights).to(pg_loss.device)
    return pg_loss, masks, {f"mis_{name}": held(values) for name, values in metrics.items()}


def _fixed(settings: CorrectionSettings, batch: TokenBatch, gather: Gather) -> Applied:
    """Return the correction that the keys describe, with Miles' metrics."""
    correction = correct(batch, settings.correction(), gather)
    weights, kept = correction.weights, correction.mask
    metrics: TokenMetrics = {}
    if weights is not None:
        bounded, metrics = _bounded(settings, batch)
        metrics["is_ratio_mean_after_tis_rs"] = torch.where(kept, bounded, 0)
        if settings.tis_batch_normalize:
            factor = correction.metrics["correction/batch_norm_factor"]
            metrics["batch_norm_factor"] = torch.full_like(bounded, _divisor(factor))
        metrics |= final_metrics(dataclasses.replace(batch, mask=kept), weights)
    if settings.use_rs:
        metrics |= rejection_metrics(settings, ratios(batch, settings.rs_level))
    if settings.rs_veto_threshold is not None:
        metrics |= veto_metrics(batch, settings.rs_veto_threshold)
    return weights, kept, metrics


def _as_miles(settings: CorrectionSettings, batch: TokenBatch) -> Applied:
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


def _bounded(settings: CorrectionSettings, batch: TokenBatch) -> tuple[Tensor, TokenMetrics]:
    """Return bounded weights, or unbounded ones in mode mask: float32 [N], 0 outside the mask."""
    raw = bounded = ratios(batch, settings.tis_level)
    if settings.tis_mode == "truncate":
        bounded = raw.clamp(max=settings.tis_upper_bound)
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
    if settings.tis_level == "geometric":
        raise ValueError(
            "tis_batch_normalize=True: Miles cannot normalise weights of tis_level='geometric'. Set "
            "mis_fixed=True, which can, or take another level."
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
