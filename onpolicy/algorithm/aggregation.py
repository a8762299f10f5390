"""From losses of tokens to the loss of a global batch: every token's share of it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fallback_correction.choices import require_choice
from fallback_correction.tokens import Gather, TokenBatch, alone, exact_sum

LossAggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


@torch.no_grad()
def token_shares(
    batch: TokenBatch,
    aggregation: LossAggregation,
    gather: Gather = alone,
    *,
    scale_length: float | None = None,
) -> Tensor:
    """The factor of each token's loss such that the sum over all ranks is the aggregate: [N].

    token-mean: mean over the tokens of the global batch. seq-mean-token-{mean, sum}: mean over its
    sequences of their token mean or sum. seq-mean-token-sum-norm: that sum over the constant
    `scale_length`, as Dr. GRPO has it (arXiv 2503.20783). Sequences without a counting token are no
    sequences here. float32, 0 outside the mask.
    """
    require_choice("aggregation", aggregation, LossAggregation)
    counts = batch.counts
    if aggregation == "token-mean":
        share = torch.full_like(counts, 1 / max(exact_sum(gather(counts)), 1))
    else:
        num_sequences = max(exact_sum(gather((counts > 0).double())), 1)
        share = torch.full_like(counts, 1 / num_sequences)
        if aggregation == "seq-mean-token-mean":
            share = share / counts.clamp(min=1)
        elif aggregation == "seq-mean-token-sum-norm":
            share = share / _require_length(scale_length)
    return torch.where(batch.mask, batch.spread(share.float()), 0)


def _require_length(scale_length: float | None) -> float:
    if scale_length is None or not scale_length > 0:
        raise ValueError(
            f"scale_length={scale_length}: seq-mean-token-sum-norm divides by it. Give the longest "
            "response there can be."
        )
    return scale_length
