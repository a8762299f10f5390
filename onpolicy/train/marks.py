"""What is decided of an optimizer step's tokens over its whole global batch, before its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fallback_correction.tokens import TokenBatch
from onpolicy.config import TrainConfig
from onpolicy.train.batch import PackedBatch, WeighedBatch
from onpolicy.train.correction import step_shares


def marked(step: Sequence[WeighedBatch], config: TrainConfig) -> list[WeighedBatch]:
    """The micro-batches of an optimizer step with the marks that the flags ask for; collective.

    They do not depend on how the step is cut into ranks and micro-batches.
    """
    if config.algorithm.positive_nll_coef:
        step = _with_positive_shares(step, config)
    return list(step)


def _with_positive_shares(
    step: Sequence[WeighedBatch], config: TrainConfig
) -> Sequence[WeighedBatch]:
    above = config.algorithm.positive_nll_above
    positive = _of_samples(step, [[s.sample.reward > above for s in b.samples] for b in step])
    rollout = torch.cat([batch.rollout_log_probs for batch in step])
    mask = torch.cat([batch.mask for batch in step]) & positive
    lengths = [n for batch in step for n in batch.response_lens]
    shares = step_shares(TokenBatch.packed(rollout, rollout, lengths, mask), step, config)
    parts = shares.split([len(batch.mask) for batch in step])
    return [replace(b, positive_shares=part) for b, part in zip(step, parts, strict=True)]


def _of_samples(step: Sequence[PackedBatch], values: Sequence[Sequence[bool]]) -> Tensor:
    """The value of each token's sample: bool [N]."""
    each = [
        value
        for batch, of_batch in zip(step, values, strict=True)
        for value, length in zip(of_batch, batch.response_lens, strict=True)
        for _ in range(length)
    ]
    return torch.tensor(each, device=step[0].mask.device)
