"""The optimal token baseline (OTB, arXiv 2602.07078): a baseline for each place of a prompt's responses.

    w_t = 1 - 2 pi_t + sum over v of pi_t(v)^2        the squared norm of the score by the logits
    W_t = w_1 + ... + w_t
    A_t = G_t - sum_i G_it W_it / sum_i W_it          over the prompt's responses that have a token t

pi_t is the probability of the sampled token, pi_t(v) that of any, and G_t the sum of rewards from t on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest
from math import exp, fsum


def score_norms(log_probs: Sequence[float], squares: Sequence[float]) -> list[float]:
    """Return W_t of a response from the sampled tokens' log-probabilities and the sums of pi_t(v)^2, [R]
    each, in float64."""
    pairs = zip(log_probs, squares, strict=True)
    return [*accumulate(max(1 - 2 * exp(x) + square, 0.0) for x, square in pairs)]


def token_baseline_advantages(
    returns: Sequence[Sequence[float]], norms: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Return A_t of a prompt's responses, in their order, from G_t and W_t of each.

    Where all that have a token t have the same G_t, as where only one has, A_t is exactly 0; so is the
    baseline of a prompt's only response, as in verl (`compute_optimal_token_baseline_advantage`), and
    where every W_t is 0.
    """
    if len(returns) == 1:
        return [[*returns[0]]]
    baselines = []
    for place in zip_longest(*map(zip, returns, norms)):
        there = [pair for pair in place if pair is not None]
        total = fsum(w for _, w in there)
        equal = len({g for g, _ in there}) == 1
        mean = fsum(g * w for g, w in there) / total if total else 0.0
        baselines.append(there[0][0] if equal else mean)
    return [[g - b for g, b in zip(each, baselines, strict=False)] for each in returns]
