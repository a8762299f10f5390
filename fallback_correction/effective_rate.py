"""The learning rate by the effective sample size of a step's weights (VCPO, arXiv 2602.17616).

factor = sqrt(ESS / B),   ESS = (sum w)^2 / sum w^2,   B: the number of weights
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fallback_correction.config import BY_TOKEN, Level
from fallback_correction.ranges import require_choice
from fallback_correction.tokens import TokenBatch

WEIGHT_SUMS = ("weights/count", "weights/sum", "weights/squares")
"""Names of these sums among the metrics of a loss."""


@torch.no_grad()
def weight_sums(batch: TokenBatch, weights: Tensor, level: Level) -> tuple[Tensor, Tensor, Tensor]:
    """Return (B, sum w, sum w^2) of a part of the step's batch, to be added over its parts.

    weights: float32 [N], 0 where a token was rejected. At levels token and prefix-min every counting
    token has a weight, at the others every sequence or turn: the mean over its tokens, equal unless some
    are rejected.
    """
    require_choice("level", level, Level)
    w = torch.where(batch.mask, weights, 0).double()
    count = batch.mask.double()
    if level not in BY_TOKEN:
        batch = batch.by_turn(level)
        w, count = batch.means(w), (batch.counts > 0).double()
    return count.sum(), w.sum(), w.square().sum()


def rate_factor(count: float, total: float, squares: float) -> float:
    """Return the factor of the learning rate: 1 for equal weights, and where there is none; 0 where all
    are 0."""
    if not count:
        return 1.0
    return min(math.sqrt(total**2 / (count * squares)), 1.0) if squares else 0.0
