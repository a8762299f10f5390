"""Policy-gradient objectives as a loss per token, before weights, masks and aggregation.

Which policy stands in the ratio's denominator is the caller's choice, and makes the variants of
arXiv 1707.06347 that mismatch needs: the trainer's recomputed log-probabilities (PPO, or with
importance weights the decoupled three-policy PPO, arXiv 2110.00641 eq. 2), or the rollout's (bypass).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fallback_correction.choices import require_choices
from fallback_correction.ratios import clamped
from fallback_correction.tokens import TokenBatch

Objective = Literal["ppo", "gspo", "cispo", "reinforce"]

LOG_RATIO_CLAMP = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    kind: Objective = "ppo"

    eps_clip: float = 0.2
    """The ratio is clipped at 1 - eps_clip ..."""

    eps_clip_high: float = 0.2
    """... and 1 + eps_clip_high (clip-higher, DAPO, arXiv 2503.14476 eq. 10)."""

    eps_clip_c: float | None = None
    """Dual clip: with a negative advantage the loss is at most -c A (arXiv 1912.09729, eq. 5)."""

    def __post_init__(self) -> None:
        require_choices(self)
        if self.eps_clip_c is not None and not self.eps_clip_c > 1:
            raise ValueError(
                f"eps_clip_c={self.eps_clip_c}: must be greater than 1. None switches dual clip off."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """What an objective says of every token."""

    loss: Tensor
    """float32 [N], with gradient: minimise it. 0 outside the mask, whatever stands there."""

    clipped: Tensor
    """bool [N]: tokens whose gradient the clip took away (CISPO: whose ratio it bounded)."""


def token_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    batch: TokenBatch,
    config: ObjectiveConfig,
) -> TokenLoss:
    """The objective of every token: three float32 [N]; `batch` says which tokens make a sequence."""
    # NaN times 0 is NaN, in the gradient too: what is masked must not enter.
    log_probs, old_log_probs, advantages = (
        torch.where(batch.mask, values, 0)
        for values in (log_probs, old_log_probs.detach(), advantages)
    )
    if config.kind == "reinforce":
        # Williams 1992; corrections come as importance weights.
        return TokenLoss(loss=-advantages * log_probs, clipped=torch.zeros_like(batch.mask))
    if config.kind == "cispo":
        return _cispo(log_probs, old_log_probs, advantages, config)
    log_ratio = log_probs - old_log_probs
    if config.kind == "gspo":
        log_ratio = _sequence_log_ratio(log_ratio, batch)
    return _ppo(torch.exp(clamped(log_ratio, LOG_RATIO_CLAMP)), advantages, config)


def _ppo(ratio: Tensor, advantages: Tensor, config: ObjectiveConfig) -> TokenLoss:
    """PPO-clip (arXiv 1707.06347, eq. 7), with dual clip if asked for."""
    bounded = ratio.clamp(1 - config.eps_clip, 1 + config.eps_clip_high)
    unclipped_loss, clipped_loss = -ratio * advantages, -bounded * advantages
    loss = torch.maximum(unclipped_loss, clipped_loss)
    clipped = clipped_loss > unclipped_loss
    if config.eps_clip_c is not None:
        limit = -config.eps_clip_c * advantages
        capped = (advantages < 0) & (limit < loss)
        loss, clipped = torch.where(capped, limit, loss), clipped | capped
    return TokenLoss(loss=loss, clipped=clipped)


def _sequence_log_ratio(log_ratio: Tensor, batch: TokenBatch) -> Tensor:
    """GSPO's length-normalised sequence ratio (arXiv 2507.18071, eq. 7), the same for all its tokens."""
    return batch.spread(batch.means(log_ratio).float())


def _cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: ObjectiveConfig
) -> TokenLoss:
    """Clipped weights on REINFORCE: every token keeps its gradient (arXiv 2506.13585, eq. 4)."""
    ratio = torch.exp(clamped(log_probs.detach() - old_log_probs, LOG_RATIO_CLAMP))
    bounded = ratio.clamp(1 - config.eps_clip, 1 + config.eps_clip_high)
    return TokenLoss(loss=-bounded * advantages * log_probs, clipped=bounded != ratio)


@torch.no_grad()
def opsm_mask(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    batch: TokenBatch,
    delta: float,
) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, eq. 9): bool [N], false for what is dropped.

    Drops tokens of negative advantage in sequences whose mean log(pi_rollout / pi) exceeds `delta`.
    The paper calls that policy pi_old: "the sampling probability directly returned by the inference
    framework", so that both sources of off-policyness count.
    """
    drift = batch.spread(batch.means(rollout_log_probs - log_probs))
    return batch.mask & ~((advantages < 0) & (drift > delta))
