"""Log-ratios between the two engines, per token and per sequence."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fallback_correction.choices import require_choice
from fallback_correction.config import CorrectionConfig, Level, WeightLevel
from fallback_correction.tokens import NonfiniteError, TokenBatch


def log_ratios(batch: TokenBatch) -> Tensor:
    """Return r = log pi_train - log pi_rollout of the tokens that count, 0 elsewhere: float32 [N]."""
    r = batch.train_log_probs - batch.rollout_log_probs
    return torch.where(batch.mask, r, 0)


def without_nonfinite(batch: TokenBatch, config: CorrectionConfig) -> TokenBatch:
    """Return the batch without the tokens whose log-ratio is NaN or infinite. Call it before any other
    use of the batch; this alone defines which tokens are rejected as not finite.

    Raises NonfiniteError, a ValueError, for the first one if `config.nonfinite` is error.
    """
    bad = ~torch.isfinite(log_ratios(batch))
    if not bad.any():
        return batch
    if config.nonfinite == "error":
        raise NonfiniteError(_first_nonfinite(batch, bad))
    if config.looks_at_sequences:
        bad = batch.spread(batch.sums(bad.float()) > 0)
    return dataclasses.replace(batch, mask=batch.mask & ~bad)


def _first_nonfinite(batch: TokenBatch, bad: Tensor) -> str:
    i = int(bad.nonzero()[0])
    sequence = int((batch.lengths.cumsum(0) <= i).sum())
    return (
        f"train_log_prob={batch.train_log_probs[i].item()}, "
        f"rollout_log_prob={batch.rollout_log_probs[i].item()} at token {i} (sequence {sequence}), one "
        f"of {int(bad.sum())}: log-probabilities must be finite. Look for diverged weights, or reject "
        "such tokens with nonfinite='reject'."
    )


def level_log_ratios(batch: TokenBatch, r: Tensor, level: Level) -> Tensor:
    """Return the log-weight of every token before any bound: float32 [N]. Raises ValueError for the
    level `none`."""
    require_choice("level", level, WeightLevel)
    if level == "token":
        return r
    per_sequence = batch.sums(r) if level == "sequence" else batch.means(r)
    return batch.spread(per_sequence.float())


def clamped(x: Tensor, limit: float | None) -> Tensor:
    """Clamp to +- limit, if there is one."""
    return x if limit is None else x.clamp(-limit, limit)
