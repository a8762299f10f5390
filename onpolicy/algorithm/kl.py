"""KL penalties towards a reference model, from the log-probabilities of sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fallback_correction.choices import require_choice
from fallback_correction.ratios import clamped
from onpolicy.algorithm.registry import KlType

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
    return _limited(_estimate(ref_log_probs - log_probs, kind, log_ratio_clamp), kind)


def unbiased_kl(
    log_probs: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, kind: KlType = "k3"
) -> Tensor:
    """Return the estimate times pi / pi_old, which has the gradient of the KL (DeepSeek-V3.2, eq. 7).

    The gradient flows through the ratio too. old_log_probs must come from the behavior policy, or the
    estimate is biased. low_var_kl is cut after the product, as in Miles and slime, and is biased where
    it is cut. Raises ValueError for k2, whose mean is not the KL. All [N].
    """
    if kind == "k2":
        raise ValueError(
            "kind='k2': the mean of x^2 / 2 is not the KL, so no ratio makes it unbiased. Use k1, k3 or "
            "low_var_kl with the ratio, or k2 without it, whose gradient on-policy is the KL's."
        )
    ratio = torch.exp(clamped(log_probs - old_log_probs.detach(), 20.0))
    return _limited(ratio * _estimate(ref_log_probs - log_probs, kind, 20.0), kind)


def _estimate(x: Tensor, kind: KlType, log_ratio_clamp: float | None) -> Tensor:
    require_choice("kind", kind, KlType)
    if kind == "k1":
        return -x
    if kind == "k2":
        return x.square() / 2
    x = clamped(x, log_ratio_clamp)
    return torch.expm1(x) - x


def _limited(kl: Tensor, kind: KlType) -> Tensor:
    return kl.clamp(max=LOW_VAR_LIMIT) if kind == "low_var_kl" else kl
