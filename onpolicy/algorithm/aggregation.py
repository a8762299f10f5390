"""Aggregation of token losses: each token's share of the loss of a global batch."""

from __future__ import annotations

import torch
from torch import Tensor

from fallback_correction.choices import require_choice
from fallback_correction.tokens import Gather, TokenBatch, alone, exact_sum
from onpolicy.algorithm.registry import LossAggregation


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
