"""Selection of tokens by comparing all tokens of a global batch.

The selection does not depend on the batch's order or on its spread over ranks. `gather` concatenates a
vector over the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fallback_correction.tokens import Gather, TokenBatch, alone, global_token_mean


@torch.no_grad()
def top_entropy(batch: TokenBatch, entropy: Tensor, share: float, gather: Gather = alone) -> Tensor:
    """Return the tokens whose entropy is at least the (1 - share)-quantile of all that count: bool [N].

    entropy: float32 [N]. The quantile is linear between neighbours, as in TRL's
    `GRPOTrainer.get_high_entropy_mask` (arXiv 2506.01939).
    """
    everyone = gather(entropy[batch.mask].double()).sort().values
    if not len(everyone):
        return batch.mask
    place = (1 - share) * (len(everyone) - 1)
    below, above = everyone[int(place)], everyone[min(int(place) + 1, len(everyone) - 1)]
    bound = float(below + (above - below) * (place - int(place)))
    return batch.mask & (entropy.double() >= bound)


@torch.no_grad()
def covariances(
    batch: TokenBatch, log_probs: Tensor, advantages: Tensor, gather: Gather = alone
) -> Tensor:
    """Return (log pi - its mean) (A - its mean) of each token (arXiv 2505.22617): float64 [N]; means
    are over all tokens that count. log_probs, advantages: float32 [N]."""
    left, right = (
        values.double() - global_token_mean(batch, values, gather)
        for values in (log_probs, advantages)
    )
    return left * right


@torch.no_grad()
def smallest(
    values: Tensor, draws: Tensor, among: Tensor, count: int, gather: Gather = alone
) -> Tensor:
    """Select the `count` tokens with the smallest values among the candidates of all ranks, or all if
    there are fewer: bool [N]. Equal values are ordered by their draws.

    values, draws: float64 [N]; among: the candidates, bool [N].
    """
    ours = torch.stack((values[among], draws[among]), dim=1)
    everyone = gather(ours)
    if len(everyone) <= count:
        return among
    # Two stable sorts order by value, then by draw; the last selected pair is the cut.
    by_draw = everyone[everyone[:, 1].argsort(stable=True)]
    value, draw = by_draw[by_draw[:, 0].argsort(stable=True)][count - 1].tolist()
    is_first: Tensor = (values < value) | ((values == value) & (draws <= draw))
    return among & is_first


def clip_cov(
    batch: TokenBatch,
    covariances: Tensor,
    draws: Tensor,
    share: float,
    bounds: tuple[float, float],
    gather: Gather = alone,
) -> Tensor:
    """Select Clip-Cov's tokens (arXiv 2505.22617): bool [N]. Among tokens with a covariance within both
    bounds, take the smallest draws, as many as `share` of all that count, at least one.

    verl's `compute_policy_loss_clip_cov` takes their gradient away.
    """
    low, high = bounds
    among = batch.mask & (covariances > low) & (covariances < high)
    return smallest(torch.zeros_like(draws), draws, among, _count(batch, share, gather), gather)


def kl_cov(
    batch: TokenBatch, covariances: Tensor, draws: Tensor, share: float, gather: Gather = alone
) -> Tensor:
    """Select KL-Cov's tokens (arXiv 2505.22617): bool [N], those with the largest covariances, as many
    as `share` of all that count, at least one. verl's `compute_policy_loss_kl_cov` penalises their
    |log-ratio|."""
    return smallest(-covariances, draws, batch.mask, _count(batch, share, gather), gather)


def _count(batch: TokenBatch, share: float, gather: Gather) -> int:
    return max(int(share * int(gather(batch.counts).sum())), 1)
