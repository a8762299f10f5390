"""The samples of one optimizer step, as the micro-batches that one rank computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fallback_correction.config import CorrectionConfig
from fallback_correction.tokens import TokenBatch
from onpolicy.models.policy import PackedTokens
from onpolicy.train.packing import pack
from onpolicy.types import Completion, FinishReason, Prompt, Sample, TrainSample

_FILLER = TrainSample(
    sample=Sample(
        prompt=Prompt(index=-1, prompt_ids=[0], label="", text=""),
        sample_index=0,
        completion=Completion(
            response_ids=[0],
            rollout_log_probs=[0.0],
            finish_reason=FinishReason.LENGTH,
            weight_version="",
            num_cached_tokens=0,
        ),
    ),
    advantage=0.0,
)
"""Stands in an empty micro-batch, masked out."""


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Packed samples and what the loss needs of them; tensors are [R], float32 but for the mask.

    What is None at first is filled in before the first optimizer step of a rollout.
    """

    packed: PackedTokens
    samples: list[TrainSample]
    rollout_log_probs: Tensor
    advantages: Tensor

    mask: Tensor
    """bool: the tokens that count. None of a filler, which only keeps this rank in step with the
    others, and none that was rejected as not finite."""

    old_log_probs: Tensor | None = None
    """Of the policy before the first optimizer step of this rollout."""

    train_log_probs: Tensor | None = None
    """Of the loss's own forward pass."""

    ref_log_probs: Tensor | None = None
    """Of the reference model, for a KL penalty."""

    shares: Tensor | None = None
    """Each token's share of the mean over the global batch."""

    importance_weights: Tensor | None = None
    """Factors of each token's policy loss, of an unaligned rollout; 0 where it is rejected."""

    kept: Tensor | None = None
    """bool: the tokens that count and that no correction rejected; None: all that count."""

    correction: CorrectionConfig | None = None
    """Weights and rejection that the loss is to take from its own log-probabilities."""

    custom: CustomCorrection | None = None
    """The user's own correction."""

    @property
    def is_filler(self) -> bool:
        return self.samples[0] is _FILLER

    @property
    def sampled(self) -> Tensor:
        """bool [R]: the tokens of samples, whether they are finite or not."""
        return torch.full_like(self.mask, not self.is_filler)

    @property
    def response_lens(self) -> list[int]:
        return [len(s.sample.response_ids) for s in self.samples]

    def tokens(self, log_probs: Tensor) -> TokenBatch:
        """The batch with `log_probs` [R] as the trainer's."""
        return TokenBatch.packed(log_probs, self.rollout_log_probs, self.response_lens, self.mask)

    def locate(self, row: int) -> tuple[TrainSample, int]:
        """The sample that response token `row` belongs to, and its position in the response."""
        for sample, length in zip(self.samples, self.response_lens, strict=True):
            if row < length:
                return sample, row
            row -= length
        raise IndexError(row)


CustomCorrection = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""(loss [R], its log-probabilities [R], detached, micro-batch) -> (loss [R], mask [R], metrics)."""


def make_micro_batches(
    samples: Sequence[TrainSample],
    *,
    rank: int,
    num_ranks: int,
    max_tokens: int,
    temperature: float,
    device: torch.device,
) -> list[MicroBatch]:
    """The micro-batches of `rank`; `samples` are the global batch."""
    plan = pack([len(s.sample.token_ids) for s in samples], num_ranks, max_tokens)[rank]
    return [_micro_batch([samples[i] for i in part], temperature, device) for part in plan]


def _micro_batch(
    samples: list[TrainSample], temperature: float, device: torch.device
) -> MicroBatch:
    is_filler = not samples
    samples = samples or [_FILLER]
    sampled = [s.sample for s in samples]
    lens = torch.tensor([len(s.response_ids) for s in sampled])
    advantages = torch.tensor([s.advantage for s in samples], dtype=torch.float32)
    log_probs = torch.tensor([x for s in sampled for x in s.rollout_log_probs], dtype=torch.float32)
    return MicroBatch(
        packed=PackedTokens.pack(
            [s.token_ids for s in sampled],
            [len(s.prompt.prompt_ids) for s in sampled],
            temperature,
            device,
            [s.completion.routed_experts for s in sampled],
        ),
        samples=samples,
        rollout_log_probs=log_probs.to(device),
        advantages=advantages.repeat_interleave(lens).to(device),
        mask=torch.full((len(log_probs),), not is_filler, device=device),
    )
