"""The samples of one optimizer step, as the micro-batches that one rank computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onpolicy.models.policy import PackedTokens
from onpolicy.train.loss import token_weights
from onpolicy.train.packing import pack
from onpolicy.types import TrainSample

_FILLER = TrainSample(
    token_ids=[0, 0], prompt_len=1, rollout_log_probs=[0.0], advantage=0.0, label="filler"
)
"""Stands in an empty micro-batch, with weight 0 and nothing to compare."""


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Packed samples and what the loss needs of them; tensors are float32 [R]."""

    packed: PackedTokens
    samples: list[TrainSample]
    rollout_log_probs: Tensor
    advantages: Tensor
    weights: Tensor

    is_filler: bool = False
    """Whether it only keeps this rank in step with the others."""

    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None

    def locate(self, row: int) -> tuple[TrainSample, int]:
        """The sample that response token `row` belongs to, and its position in the response."""
        for sample in self.samples:
            length = len(sample.token_ids) - sample.prompt_len
            if row < length:
                return sample, row
            row -= length
        raise IndexError(row)


def make_micro_batches(
    samples: Sequence[TrainSample],
    *,
    rank: int,
    num_ranks: int,
    max_tokens: int,
    temperature: float,
    aggregation: str,
    device: torch.device,
) -> list[MicroBatch]:
    """The micro-batches of `rank`; weights refer to all `samples`, the global batch."""
    weights = token_weights([len(s.rollout_log_probs) for s in samples], aggregation)
    plan = pack([len(s.token_ids) for s in samples], num_ranks, max_tokens)[rank]
    return [
        _micro_batch([samples[i] for i in part], [weights[i] for i in part], temperature, device)
        for part in plan
    ]


def _micro_batch(
    samples: list[TrainSample], weights: list[float], temperature: float, device: torch.device
) -> MicroBatch:
    is_filler = not samples
    if is_filler:
        samples, weights = [_FILLER], [0.0]
    lens = torch.tensor([len(s.rollout_log_probs) for s in samples])

    def per_token(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(lens).to(device)

    log_probs = [x for s in samples for x in s.rollout_log_probs]
    return MicroBatch(
        packed=PackedTokens.pack(
            [s.token_ids for s in samples], [s.prompt_len for s in samples], temperature, device
        ),
        samples=samples,
        rollout_log_probs=torch.tensor(log_probs, dtype=torch.float32, device=device),
        advantages=per_token([s.advantage for s in samples]),
        weights=per_token(weights),
        is_filler=is_filler,
    )
