"""Rejection of tokens and sequences whose mismatch is too large to train on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fallback_correction.choices import require_choice
from fallback_correction.config import RejectionRule, Veto
from fallback_correction.ratios import clamped
from fallback_correction.tokens import Gather, TokenBatch, alone

Divergence = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The tokens that a rule rejects, bool [N] within the mask, by side."""

    low: Tensor
    """Tokens with too small a rho; for k2 and k3: with a statistic below its lower bound."""

    high: Tensor

    @property
    def either(self) -> Tensor:
        return self.low | self.high


def apply_rule(batch: TokenBatch, r: Tensor, rule: RejectionRule, limit: float | None) -> Rejected:
    """Return the tokens that one rule rejects. r: float32 [N]; log-ratios are clamped to +- limit
    before exp."""
    if rule.statistic == "ratio" or rule.statistic == "k1":
        values = torch.exp(clamped(_aggregate_log_ratios(batch, r, rule), limit))
    else:
        values = _aggregate(batch, divergence(clamped(r, limit), rule.statistic), rule)
    return Rejected(
        low=batch.mask & ~(values >= rule.lower), high=batch.mask & ~(values <= rule.upper)
    )


def divergence(r: Tensor, statistic: Divergence) -> Tensor:
    """Compute k1 = -r, k2 = r^2 / 2, k3 = exp(r) - r - 1 (http://joschu.net/blog/kl-approx.html): [N]
    -> [N]."""
    require_choice("statistic", statistic, Divergence)
    if statistic == "k1":
        return -r
    return r.square() / 2 if statistic == "k2" else torch.expm1(r) - r


def _aggregate_log_ratios(batch: TokenBatch, r: Tensor, rule: RejectionRule) -> Tensor:
    if rule.statistic == "k1" and rule.aggregation == "max":
        return -_aggregate(batch, -r, rule)
    return _aggregate(batch, r, rule)


def _aggregate(batch: TokenBatch, values: Tensor, rule: RejectionRule) -> Tensor:
    if rule.aggregation == "token":
        return values
    of_sequences = {"sum": batch.sums, "mean": batch.means, "max": batch.maxima}
    return batch.spread(of_sequences[rule.aggregation](values).float())


def beyond_second_moment(
    batch: TokenBatch, r: Tensor, limit: float, gather: Gather = alone
) -> Tensor:
    """Return M2PO's rejected tokens (arXiv 2510.01161): the tokens of the largest r^2 on all ranks, as
    many as it takes for the mean r^2 of the others to be below `limit`: bool [N].

    It follows AReaL's `_apply_m2po_masking`, but tokens of equal r^2 are kept or rejected together, and
    where no mean is below the limit the smallest are kept.
    """
    squares = r.double().square()
    ascending = gather(squares[batch.mask]).sort().values
    counts = torch.arange(1, len(ascending) + 1, device=ascending.device)
    # Means of ascending values never fall, so the kept tokens are a prefix.
    kept = int((ascending.cumsum(0) / counts < limit).sum())
    if kept == len(ascending):
        return torch.zeros_like(batch.mask)
    smallest, first = ascending[0].item(), ascending[kept].item()
    return batch.mask & (squares >= first) & (squares > smallest)


def apply_veto(batch: TokenBatch, r: Tensor, veto: Veto) -> tuple[Tensor, Tensor]:
    """Return the tokens beyond the veto's bounds, and all tokens of their sequences: two bool [N]."""
    values = torch.exp(r if veto.by == "ratio" else batch.rollout_log_probs)
    outside = batch.mask & ~((values >= veto.lower) & (values <= veto.upper))
    sequences = batch.spread(batch.sums(outside.float()) > 0)
    return outside, batch.mask & sequences
