"""Policy-gradient objectives as a loss per token, before weights, masks and aggregation.

An objective is a ratio and a bound (`registry.py`). The caller chooses the policy in the ratio's
denominator, which gives the variants of arXiv 1707.06347 that handle a mismatch: the trainer's
recomputed log-probabilities (PPO, or with importance weights the decoupled three-policy PPO, arXiv
2110.00641 eq. 2), or the rollout's (bypass).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fallback_correction.choices import require_choices
from fallback_correction.ratios import clamped
from fallback_correction.tokens import TokenBatch
from onpolicy.algorithm.registry import OBJECTIVES, Bound, Level, Objective, Ratio

LOG_RATIO_CLAMP = 20.0

SMALLEST_LOG_WEIGHT = math.log(1e-8)
"""Lower limit of VESPO's log w, as in TRL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    kind: Objective = "ppo"

    eps_clip: float = 0.2
    """Distance below 1 at which the ratio is clipped: 1 - eps_clip."""

    eps_clip_high: float = 0.2
    """Distance above 1 at which the ratio is clipped: 1 + eps_clip_high (clip-higher, DAPO, arXiv
    2503.14476 eq. 10)."""

    eps_clip_c: float | None = None
    """Dual clip: the loss of a negative advantage is at most -c A (arXiv 1912.09729, eq. 5). For a
    bound that is a mask: the largest ratio (arXiv 2602.04879, section 5.4)."""

    importance_sampling_level: Level | None = None
    """Ratio that replaces the objective's own."""

    force_on_policy_ratio: bool = False
    """Whether the current policy replaces the old one: the ratio is 1, with its gradient."""

    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        require_choices(self)
        if self.eps_clip_c is not None and not self.eps_clip_c > 1:
            raise ValueError(
                f"eps_clip_c={self.eps_clip_c}: must be greater than 1. None switches dual clip off."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The loss of every token under an objective."""

    loss: Tensor
    """Loss to minimise, float32 [N], with gradient; 0 outside the mask."""

    clipped: Tensor
    """Tokens without a gradient because of the bound (CISPO: with a bounded ratio), bool [N]."""


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

    def by_sign(self, positive: float, negative: float) -> Tensor:
        """Return `positive` for tokens with a positive advantage and `negative` for the rest."""
        return torch.where(self.advantages > 0, positive, negative)


def token_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    batch: TokenBatch,
    config: ObjectiveConfig,
) -> TokenLoss:
    """Return the objective of every token from three float32 [N]; `batch` holds the sequence lengths."""
    if config.force_on_policy_ratio:
        old_log_probs = log_probs
    # NaN times 0 is NaN, in the gradient too: masked values must not enter.
    log_probs, old_log_probs, advantages = (
        torch.where(batch.mask, values, 0)
        for values in (log_probs, old_log_probs.detach(), advantages)
    )
    entry = OBJECTIVES[config.kind]
    step = _Step(log_probs, old_log_probs, log_probs - old_log_probs, advantages, batch, config)
    log_ratio = RATIOS[config.importance_sampling_level or entry.ratio](step)
    return BOUNDS[entry.bound](replace(step, log_ratio=log_ratio))


# Ratios: from log-ratios of tokens to the log-ratios that are bounded


def _sequence(step: _Step) -> Tensor:
    """Return GSPO's length-normalised log-ratio (arXiv 2507.18071, eq. 7), equal for all tokens of a
    sequence."""
    return step.batch.spread(step.batch.means(step.log_ratio).float())


def _sequence_token(step: _Step) -> Tensor:
    """Return the value of GSPO's log-ratio with the gradient of each token's own (eq. 14)."""
    return step.log_probs - step.log_probs.detach() + _sequence(step).detach()


def _product(step: _Step) -> Tensor:
    """Return the log-ratio of the whole sequence, not normalised by its length."""
    clipped = clamped(step.log_ratio, LOG_RATIO_CLAMP)
    return step.batch.spread(step.batch.sums(clipped).float())


RATIOS: dict[Ratio, Callable[[_Step], Tensor]] = {
    "none": lambda step: step.log_ratio,
    "token": lambda step: step.log_ratio,
    "sequence": _sequence,
    "sequence-token": _sequence_token,
    "product": _product,
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


def _gate(step: _Step) -> TokenLoss:
    """Return the loss of SAPO's soft gate (arXiv 2511.20347): no clipping, less weight for far
    ratios."""
    tau = step.by_sign(step.config.sapo_tau_pos, step.config.sapo_tau_neg)
    gate = torch.sigmoid(tau * (step.ratio - 1)) * (4 / tau)
    return TokenLoss(loss=-gate * step.advantages, clipped=torch.zeros_like(step.batch.mask))


def _gamma(step: _Step) -> TokenLoss:
    """Return VESPO's loss (arXiv 2602.10693), with sequence weights that are 1 at w = 1, computed in
    logs as in TRL."""
    config = step.config
    log_w = step.log_ratio.detach().clamp(SMALLEST_LOG_WEIGHT, LOG_RATIO_CLAMP)
    no_worse = step.advantages >= 0
    k = torch.where(no_worse, config.vespo_k_pos, config.vespo_k_neg)
    rate = torch.where(no_worse, config.vespo_lambda_pos, config.vespo_lambda_neg)
    weight = torch.exp(rate + k * log_w - rate * log_w.exp())
    loss = -weight * step.advantages * step.log_probs
    return TokenLoss(loss=loss, clipped=torch.zeros_like(step.batch.mask))


def _clip_then_mean(step: _Step) -> TokenLoss:
    """Return the loss of GMPO (arXiv 2507.20673): clip log-ratios by token, then average over the
    sequence."""
    r, sign, config = step.log_ratio, step.advantages.sign(), step.config
    bounded = r.clamp(-config.eps_clip, config.eps_clip_high)
    smaller = sign * torch.minimum(sign * r, sign * bounded)
    ratio = torch.exp(step.batch.spread(step.batch.means(smaller).float()))
    return TokenLoss(loss=-step.advantages * ratio, clipped=sign * bounded < sign * r)


def _masked(dropped: Callable[[_Step], Tensor]) -> Callable[[_Step], TokenLoss]:
    """Make a bound that drops tokens, value and gradient; the others have the loss -rho A, with its
    gradient.

    The ratio is capped at `eps_clip_c` and keeps its gradient there, as in verl's dppo.
    """

    def bound(step: _Step) -> TokenLoss:
        largest = step.config.eps_clip_c
        ratio = step.ratio.detach().clamp(max=math.inf if largest is None else largest)
        own = torch.exp(step.log_probs - step.log_probs.detach())
        left_out = step.batch.mask & dropped(step)
        loss = torch.where(left_out, 0, -ratio * step.advantages * own)
        return TokenLoss(loss=loss, clipped=left_out)

    return bound


def _moved(step: _Step) -> Tensor:
    """Return pi - pi_old of the sampled token."""
    return (step.log_probs.exp() - step.old_log_probs.exp()).detach()


def _tv(step: _Step) -> Tensor:
    """Return which tokens DPPO-Binary-TV drops (arXiv 2602.04879): those that moved far enough in the
    direction of their advantage."""
    moved, config = _moved(step), step.config
    return torch.where(step.advantages > 0, moved > config.eps_clip_high, moved < -config.eps_clip)


def _tv_both(step: _Step) -> Tensor:
    moved = _moved(step)
    return (moved > step.config.eps_clip_high) | (moved < -step.config.eps_clip)


def _binary_kl(step: _Step) -> Tensor:
    """Return which tokens DPPO-Binary-KL drops, by the KL of (token, any other) between the two
    policies; 1e-8 as in verl."""
    new, old, moved = step.log_probs.detach().exp(), step.old_log_probs.exp(), _moved(step)
    others = torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    kl = old * (step.old_log_probs - step.log_probs.detach()) + (1 - old) * others
    up = (kl > step.config.eps_clip_high) & (moved > 0)
    down = (kl > step.config.eps_clip) & (moved < 0)
    return torch.where(step.advantages > 0, up, down)


def _band(step: _Step) -> Tensor:
    ratio, config = step.ratio.detach(), step.config
    return (ratio < 1 - config.eps_clip) | (ratio > 1 + config.eps_clip_high)


BOUNDS: dict[Bound, Callable[[_Step], TokenLoss]] = {
    "none": _unbounded,
    "clip": _clip,
    "weight": _weight,
    "gate": _gate,
    "gamma": _gamma,
    "clip-then-mean": _clip_then_mean,
    "tv": _masked(_tv),
    "tv-both": _masked(_tv_both),
    "binary-kl": _masked(_binary_kl),
    "band": _masked(_band),
}


@torch.no_grad()
def opsm_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    batch: TokenBatch,
    delta: float,
) -> Tensor:
    """Compute off-policy sequence masking (DeepSeek-V3.2, eq. 9): bool [N], false for dropped tokens.

    It drops tokens of negative advantage in sequences whose mean log(pi_rollout / pi) exceeds `delta`.
    The paper calls the rollout's policy pi_old: "the sampling probability directly returned by the
    inference framework", so that both sources of off-policyness count.
    """
    drift = batch.spread(batch.means(rollout_log_probs - log_probs))
    return batch.mask & ~((advantages < 0) & (drift > delta))
