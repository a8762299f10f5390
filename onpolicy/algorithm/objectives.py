"""Policy-gradient objectives as a loss per token, KL penalties, and each token's share of a loss.

An objective is a ratio and a bound (`catalogue.py`), before weights, masks and aggregation. The caller
chooses the policy in the ratio's denominator, which gives the variants of arXiv 1707.06347 that handle
a mismatch: the trainer's recomputed log-probabilities (PPO, or with importance weights the decoupled
three-policy PPO, arXiv 2110.00641 eq. 2), or the rollout's (bypass).

`kl_estimate` gives penalties towards a reference model, from the log-probabilities of sampled tokens,
and `token_shares` aggregates token losses over a global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fallback_correction.ranges import require_choice, require_choices
from fallback_correction.tokens import Gather, TokenBatch, alone, clamped, exact_sum
from onpolicy.algorithm.catalogue import (
    OBJECTIVES,
    Bound,
    KlType,
    LossAggregation,
    Objective,
    Ratio,
)

CustomLoss = Callable[[Tensor, Tensor, Tensor, TokenBatch], Tensor]
"""(log_probs, old_log_probs, advantages, float32 [N] each and 0 outside the mask, batch) -> loss [N]."""


def token_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    batch: TokenBatch,
    config: ObjectiveConfig,
) -> TokenLoss:
    """Return the objective of every token from three float32 [N]; `batch` holds the sequence lengths.

    Raises ValueError if the user's own objective returns no loss for every token.
    """
    # NaN times 0 is NaN, in the gradient too: masked values must not enter.
    log_probs, old_log_probs, advantages = (
        torch.where(batch.mask, values, 0)
        for values in (log_probs, old_log_probs.detach(), advantages)
    )
    if config.custom is not None:
        loss = config.custom(log_probs, old_log_probs, advantages, batch)
        if loss.shape != log_probs.shape:
            raise ValueError(
                f"--custom-loss-path: shape={tuple(loss.shape)} is the loss of {len(log_probs)} tokens. "
                "Return a tensor with a number for each."
            )
        loss = torch.where(batch.mask, loss, 0)
        return TokenLoss(loss=loss, clipped=torch.zeros_like(batch.mask))
    entry = OBJECTIVES[config.kind]
    step = _Step(log_probs, old_log_probs, log_probs - old_log_probs, advantages, batch, config)
    log_ratio = RATIOS[entry.ratio](step)
    return BOUNDS[entry.bound](replace(step, log_ratio=log_ratio))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The loss of every token under an objective."""

    loss: Tensor
    """Loss to minimise, float32 [N], with gradient; 0 outside the mask."""

    clipped: Tensor
    """Tokens without a gradient because of the bound (CISPO: with a bounded ratio), bool [N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    kind: Objective = "ppo"

    eps_clip: float = 0.2
    """Distance below 1 at which the ratio is clipped: 1 - eps_clip."""

    eps_clip_high: float = 0.2
    """Distance above 1 at which the ratio is clipped: 1 + eps_clip_high (clip-higher, DAPO, arXiv
    2503.14476 eq. 10)."""

    eps_clip_c: float | None = None
    """Dual clip: the loss of a negative advantage is at most -c A (arXiv 1912.09729, eq. 5)."""

    custom: CustomLoss | None = None
    """The user's own objective, which replaces `kind`."""

    def __post_init__(self) -> None:
        require_choices(self)
        if self.eps_clip_c is not None and not self.eps_clip_c > 1:
            raise ValueError(
                f"eps_clip_c={self.eps_clip_c}: must be greater than 1. None switches dual clip off."
            )


LOG_RATIO_CLAMP = 20.0


@dataclass(frozen=True, slots=True)
class _Step:
    """The inputs of a ratio and a bound: float32 [N] each, 0 outside the mask."""

    log_probs: Tensor
    old_log_probs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    batch: TokenBatch
    config: ObjectiveConfig

    @property
    def ratio(self) -> Tensor:
        return torch.exp(clamped(self.log_ratio, LOG_RATIO_CLAMP))


# Ratios: from log-ratios of tokens to the log-ratios that are bounded


def _sequence(step: _Step) -> Tensor:
    """Return GSPO's length-normalised log-ratio (arXiv 2507.18071, eq. 7), equal for all tokens of a
    sequence."""
    return step.batch.spread(step.batch.means(step.log_ratio).float())


RATIOS: dict[Ratio, Callable[[_Step], Tensor]] = {
    "none": lambda step: step.log_ratio,
    "token": lambda step: step.log_ratio,
    "sequence": _sequence,
}


# Bounds: the loss of a ratio, limited where the ratio is far from 1


def _unbounded(step: _Step) -> TokenLoss:
    """Return the loss of REINFORCE (Williams 1992); corrections multiply it as importance weights."""
    loss = -step.advantages * step.log_probs
    return TokenLoss(loss=loss, clipped=torch.zeros_like(step.batch.mask))


def _clip(step: _Step) -> TokenLoss:
    """Return the loss of PPO-clip (arXiv 1707.06347, eq. 7), with dual clip if `eps_clip_c` is given."""
    ratio, advantages, config = step.ratio, step.advantages, step.config
    bounded = ratio.clamp(1 - config.eps_clip, 1 + config.eps_clip_high)
    unclipped_loss, clipped_loss = -ratio * advantages, -bounded * advantages
    loss = torch.maximum(unclipped_loss, clipped_loss)
    clipped = clipped_loss > unclipped_loss
    if config.eps_clip_c is not None:
        limit = -config.eps_clip_c * advantages
        capped = (advantages < 0) & (limit < loss)
        loss, clipped = torch.where(capped, limit, loss), clipped | capped
    return TokenLoss(loss=loss, clipped=clipped)


def _weight(step: _Step) -> TokenLoss:
    """Return REINFORCE with clipped weights: every token keeps its gradient (arXiv 2506.13585,
    eq. 4)."""
    ratio, config = step.ratio.detach(), step.config
    bounded = ratio.clamp(1 - config.eps_clip, 1 + config.eps_clip_high)
    return TokenLoss(loss=-bounded * step.advantages * step.log_probs, clipped=bounded != ratio)


BOUNDS: dict[Bound, Callable[[_Step], TokenLoss]] = {
    "none": _unbounded,
    "clip": _clip,
    "weight": _weight,
}

LOW_VAR_LIMIT = 10.0
"""Upper limit of low_var_kl in nats, as in verl, Miles and slime."""


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, kind: KlType, log_ratio_clamp: float | None = 20.0
) -> Tensor:
    """Estimate KL(policy || reference) of each token (http://joschu.net/blog/kl-approx.html).

    With x = ref - policy: k1 = -x, k2 = x^2 / 2, k3 = exp(x) - x - 1, low_var_kl = min(k3, 10). The
    last two cut x to +- log_ratio_clamp, since k3 would overflow; a cut value has no gradient. The
    gradient of k3 reaches 4.9e8 (1 - e^20). All [N], in nats.
    """
    require_choice("kind", kind, KlType)
    x = ref_log_probs - log_probs
    if kind == "k1":
        return -x
    if kind == "k2":
        return x.square() / 2
    x = clamped(x, log_ratio_clamp)
    k3 = torch.expm1(x) - x
    return k3.clamp(max=LOW_VAR_LIMIT) if kind == "low_var_kl" else k3


@torch.no_grad()
def token_shares(
    batch: TokenBatch,
    aggregation: LossAggregation,
    gather: Gather = alone,
    *,
    scale_length: float | None = None,
    episodes: Tensor | None = None,
) -> Tensor:
    """Return the factor of each token's loss such that the sum over all ranks is the aggregate: [N].

    token-mean: mean over the tokens of the global batch. seq-mean-token-{mean, sum}: mean over its
    sequences of their token mean or sum. seq-mean-token-sum-norm: the mean of token sums, divided by
    the constant `scale_length`, as in Dr. GRPO (arXiv 2503.20783). Sequences without a counting token
    are left out. float32, 0 outside the mask.

    episodes: int64 [S], the number of each sequence's episode. All trajectories of an episode count as
    one sequence, whichever ranks hold them, so that branching gives an episode no more weight. None:
    every sequence is an episode.
    """
    require_choice("aggregation", aggregation, LossAggregation)
    counts = batch.counts
    if aggregation == "token-mean":
        share = torch.full_like(counts, 1 / max(exact_sum(gather(counts)), 1))
    else:
        if episodes is None:
            num_sequences = exact_sum(gather((counts > 0).double()))
        else:
            counts, num_sequences = _tokens_of_episodes(counts, episodes, gather)
        share = torch.full_like(counts, 1 / max(num_sequences, 1))
        if aggregation == "seq-mean-token-mean":
            share = share / counts.clamp(min=1)
        elif aggregation == "seq-mean-token-sum-norm":
            share = share / _require_length(scale_length)
    return torch.where(batch.mask, batch.spread(share.float()), 0)


def _tokens_of_episodes(counts: Tensor, episodes: Tensor, gather: Gather) -> tuple[Tensor, float]:
    """Return the number of counting tokens of each sequence's episode, float64 [S], and the number of
    episodes with any."""
    numbers, places = gather(episodes.double()).unique(return_inverse=True)
    everyones = gather(counts)
    totals = torch.zeros_like(numbers).index_add_(0, places, everyones)
    ours = totals[torch.searchsorted(numbers, episodes.to(numbers))]
    return ours.to(counts.device), float((totals > 0).sum())


def _require_length(scale_length: float | None) -> float:
    if scale_length is None or not scale_length > 0:
        raise ValueError(
            f"scale_length={scale_length}: seq-mean-token-sum-norm divides by it. Give the longest "
            "response there can be."
        )
    return scale_length
