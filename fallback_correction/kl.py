"""KL penalties towards a reference model, from the log-probabilities of sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fallback_correction.choices import require_choice
from fallback_correction.ratios import clamped

KlType = Literal["k1", "k2", "k3"]


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, kind: KlType, log_ratio_clamp: float | None = 20.0
) -> Tensor:
    """Estimators of KL(policy || reference) per token (http://joschu.net/blog/kl-approx.html).

    With x = ref - policy: k1 = -x, k2 = x^2 / 2, k3 = exp(x) - x - 1. Only k3 needs the clamp of x,
    beyond which it has no gradient; without one it overflows. All [N], in nats.
    """
    require_choice("kind", kind, KlType)
    x = ref_log_probs - log_probs
    if kind == "k1":
        return -x
    if kind == "k2":
        return x.square() / 2
    x = clamped(x, log_ratio_clamp)
    return torch.expm1(x) - x


def unbiased_kl(
    log_probs: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, kind: KlType = "k3"
) -> Tensor:
    """The estimate times pi / pi_old, whose gradient is that of the KL (DeepSeek-V3.2, eq. 7).

    The gradient flows through the ratio too. old_log_probs: of the policy that sampled. All [N].
    """
    ratio = torch.exp(clamped(log_probs - old_log_probs.detach(), 20.0))
    return ratio * kl_estimate(log_probs, ref_log_probs, kind)
