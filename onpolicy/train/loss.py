"""The policy loss of one micro-batch. Pure functions of float32 tensors; R: its response tokens.

Sums, not means: every token carries its share of the global batch as a weight, so that the loss of
a global batch is the sum over micro-batches and ranks, however it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Per token of a micro-batch; every tensor is float32 [R]."""

    log_probs: Tensor
    """Of the policy that is trained; carries the gradient."""

    old_log_probs: Tensor
    """Of the policy before the first optimizer step of this rollout."""

    advantages: Tensor

    weights: Tensor
    """Each token's share of the mean over the global batch; see `token_weights`."""

    ref_log_probs: Tensor | None = None
    """Of the reference model, for the KL penalty."""

    importance_weights: Tensor | None = None
    """Multiply the policy term of each token: where corrections for an unaligned rollout enter.
    0 takes a token out of the numerator; take it out of `weights` to drop it altogether."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The choices of a run."""

    eps_clip: float
    eps_clip_high: float
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k3"


def token_weights(response_lens: Sequence[int], aggregation: str) -> list[float]:
    """The weight of each token of every sample of a global batch: one number per sample.

    `token-mean`: 1 / tokens of the batch (DAPO, arXiv 2503.14476, eq. 8). `seq-mean`: 1 / (samples
    x tokens of the sample), the mean over samples of their token means (GRPO, eq. 3).
    """
    if aggregation == "token-mean":
        return [1.0 / max(sum(response_lens), 1)] * len(response_lens)
    return [1.0 / (len(response_lens) * max(n, 1)) for n in response_lens]


def policy_loss(inputs: LossInputs, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped PPO objective (arXiv 1707.06347, eq. 7), and a KL penalty if asked for.

    Returns (loss, sums of metrics weighted like the loss), both scalars to be summed over the
    global batch.
    """
    ratio = torch.exp(inputs.log_probs - inputs.old_log_probs)
    clipped = ratio.clamp(1 - settings.eps_clip, 1 + settings.eps_clip_high)
    objective = torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    if inputs.importance_weights is not None:
        objective = objective * inputs.importance_weights
    pg_loss = -(objective * inputs.weights).sum()
    with torch.no_grad():
        was_clipped = (clipped * inputs.advantages < ratio * inputs.advantages).float()
        metrics = {
            "train/pg_loss": pg_loss.detach(),
            "train/pg_clipfrac": (was_clipped * inputs.weights).sum(),
            "train/ppo_kl": ((inputs.old_log_probs - inputs.log_probs) * inputs.weights).sum(),
        }
    loss = pg_loss
    if inputs.ref_log_probs is not None:
        kl = kl_penalty(inputs.log_probs, inputs.ref_log_probs, settings.kl_loss_type)
        kl_loss = (kl * inputs.weights).sum()
        loss = pg_loss + settings.kl_loss_coef * kl_loss
        metrics["train/kl_loss"] = kl_loss.detach()
    metrics["train/loss"] = loss.detach()
    return loss, metrics


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimators of KL(policy || reference) per token, r = ref - policy (Schulman, 2020).

    k1: -r; k2: r^2 / 2; k3: exp(r) - r - 1. All [R] -> [R].
    """
    r = ref_log_probs - log_probs
    if kind == "k1":
        return -r
    return r.square() / 2 if kind == "k2" else torch.exp(r) - r - 1
