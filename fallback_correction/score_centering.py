"""Score centering (arXiv 2609.20807): the term of the loss that takes the drift of a policy away.

Where tokens are drawn from q and the policy p learns, A w grad log p of a token, w its importance
weight, has the mean A E_q[w grad log p] even if every token has the same advantage A. The term
subtracts that mean, which needs q of more tokens than the sampled one: of the k likeliest, H, or of all.
Outside of H, q is taken as p rescaled to what q leaves there:

    rho = (1 - sum_H q) / (1 - sum_H p)         both at least `SMALLEST_REST` (appendix A.3)
    C = sum_H c log p,   c = q w(p / q) - p rho w(1 / rho), without gradient          (eq. 12 and 14)

The loss of the token is then -A w log p + A C. Unbounded weights give c = 0; so do equal engines.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fallback_correction.config import CorrectionConfig
from fallback_correction.correction import bounded
from fallback_correction.tokens import clamped

SMALLEST_REST = 1e-6

_SHARES, _UNITS = 2.0**52, 2.0**40
"""Integers that stand for a probability of 1, and for 1: sums of integers have no order."""


def centering(log_probs: Tensor, rollout_log_probs: Tensor, config: CorrectionConfig) -> Tensor:
    """Return C of every token: float32 [N], with the gradient of `log_probs`.

    log_probs, rollout_log_probs: log p and log q of the tokens H, [N, k], normalised over all tokens
    that could be drawn, not over H. config: the weights of the sampled tokens. Raises ValueError for
    weights that are no function of one token's ratio.
    """
    if config.level not in ("none", "token") or config.mode == "taper":
        raise ValueError(
            f"level={config.level}, mode={config.mode}: score centering takes the mean over what one "
            "token could have been, of weights by its ratio alone. Use level token, or none, and "
            "another mode than taper."
        )
    terms = coefficients(log_probs.detach(), rollout_log_probs, config) * log_probs
    total = terms.sum(-1)
    return _sum(terms.detach(), torch.nan) + (total - total.detach())


@torch.no_grad()
def likeliest_kl(log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """Return the KL of q to p between "one of H" and "any other token", in nats: float32 [N].

    It is sum_H q log(q / p) and the same of the two rests. If H is the vocabulary it is the KL of the
    distributions, by whose largest over a sequence TRM masks (arXiv 2512.23075); else it is at most that
    (log-sum inequality), both within 1e-6, since the rests are at least that. log_probs,
    rollout_log_probs: as for `centering`. It is inf where p is 0 and q is not, and for a NaN.
    """
    p, q = log_probs.double(), rollout_log_probs.double()
    terms = torch.where(q == -torch.inf, 0, q.exp() * (q - p))
    rest, ours = _rest(q.exp()), _rest(p.exp())
    return _sum(torch.cat([terms, (rest * (rest / ours).log())[:, None]], -1), torch.inf)


def _sum(terms: Tensor, otherwise: float) -> Tensor:
    """Sum [N, k] to float32 [N], in no order; `otherwise` where a term is not finite."""
    bad = ~terms.isfinite()
    counted = (terms.double().masked_fill(bad, 0) * _UNITS).round().long().sum(-1)
    return (counted.double() / _UNITS).float().masked_fill(bad.any(-1), otherwise)


@torch.no_grad()
def coefficients(p: Tensor, q: Tensor, config: CorrectionConfig) -> Tensor:
    """Return c of every token of H from log p and log q: [N, k] each."""
    log_ratios, p, q = p - q, p.exp(), q.exp()
    log_rho = (_rest(q) / _rest(p)).log()
    alpha = log_rho.exp() * token_weights(-log_rho, config)
    # A token that the engine cut off has q = 0, whatever its ratio.
    drawn = torch.where(q > 0, q * token_weights(log_ratios, config), 0)
    return drawn - alpha[:, None].to(p.dtype) * p


def token_weights(log_ratios: Tensor, config: CorrectionConfig) -> Tensor:
    """Return the weights w of tokens with these log-ratios: 1 without weights, 0 where they are
    masked."""
    if not config.has_weights:
        return torch.ones_like(log_ratios)
    raw = torch.exp(clamped(log_ratios, config.log_ratio_clamp))
    if config.mode != "mask":
        return bounded(raw, config)
    return torch.where((raw >= config.lower) & (raw <= config.upper), raw, 0)


def _rest(probabilities: Tensor) -> Tensor:
    """Return what H leaves of 1: [N, k] -> float64 [N]."""
    counted = (probabilities.double() * _SHARES).round().long().sum(-1)
    return (1 - counted.double() / _SHARES).clamp(min=SMALLEST_REST)
