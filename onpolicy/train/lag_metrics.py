"""How stale a rollout's tokens were, and what that came to: metrics by lag, over the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fallback_correction.mismatch_metrics import mismatch_metrics
from fallback_correction.tokens import TokenBatch, global_token_mean
from onpolicy.train.batch import WeighedBatch
from onpolicy.train.distributed import gather_vectors


def lag_metrics(
    batches: Sequence[WeighedBatch], tokens: TokenBatch, lags: Sequence[int], upper: float
) -> dict[str, float]:
    """`lag/*` of an optimizer step's micro-batches; collective.

    tokens: all of theirs, with the trainer's log-probabilities before the step. lags: those of the whole
    rollout, on every rank the same. upper: the largest weight.
    """
    each = torch.cat([batch.lags for batch in batches])
    kept = torch.cat([batch.kept for batch in batches])
    high = (tokens.train_log_probs - tokens.rollout_log_probs).exp() > upper

    def mean(batch: TokenBatch, values: Tensor) -> float:
        return global_token_mean(batch, values.float(), gather_vectors)

    metrics = {"lag/mean": mean(tokens, each)}
    for lag in lags:
        ours = replace(tokens, mask=tokens.mask & (each == lag))
        distance = mismatch_metrics(ours, gather_vectors)
        metrics |= {
            f"lag/{lag}/share": mean(tokens, each == lag),
            f"lag/{lag}/k3": distance["mismatch/k3"],
            f"lag/{lag}/ess": distance["mismatch/ess"],
            f"lag/{lag}/clip_share": mean(ours, high),
            f"lag/{lag}/rejected_share": mean(ours, ~kept),
        }
    return metrics
