"""The micro-batches of an optimizer step: samples of one rank, laid end to end.

A micro-batch is packed, then scored (log-probabilities fixed before the first optimizer step of a
rollout, and advantages), then weighed (corrections and shares, computed over the global batch); each
stage is a copy with more fields. Tensors are [R], for all sampled tokens, and float32 unless stated
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fallback_correction.config import CorrectionConfig
from fallback_correction.correction import correct
from fallback_correction.tokens import TokenBatch, without_nonfinite
from onpolicy.config.groups import ModelConfig
from onpolicy.models.policy import PackedTokens
from onpolicy.models.shared_prefixes import share_prefixes
from onpolicy.models.token_grammars import allowed_sets
from onpolicy.ops.kept_tokens import Cut
from onpolicy.ops.row_digests import NO_DIGEST
from onpolicy.system.number_arrays import Doubles, Flags, Floats, Ints
from onpolicy.training import distributed
from onpolicy.trajectory import Trajectory
from onpolicy.types import Prompt, Sample, Term

_FILLER = Sample(
    prompt=Prompt(index=-1, prompt_ids=[0], label="", text=""),
    sample_index=0,
    trajectory=Trajectory(
        token_ids=Ints([0, 0]),
        sampled=Flags([False, True]),
        rollout_log_probs=Floats([0.0]),
        temperatures=Doubles([1.0]),
    ),
    group=-1,
    episode=-1,
)
"""Stand-in sample of an empty micro-batch, masked out."""


def _later() -> Tensor:
    """Return the value of a field until its stage gives it: to compute with it is an error."""
    return torch.empty(0, device="meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples laid end to end, with their rollout's data, and what the loss needs of each token."""

    packed: PackedTokens
    samples: list[Sample]

    numbers: list[int]
    """Numbers of the samples in their rollout; empty for a filler."""

    rollout_log_probs: Tensor

    rollout_digests: Tensor
    """Digests of the engine's rows (`ops/row_digests.py`), int64; 0 where it gave none."""

    lags: Tensor
    """Staleness, int32: the number of pushes between the policy that sampled each token and the one
    that is trained."""

    mask: Tensor
    """Tokens that count, bool. A filler, which only keeps this rank in step with the others, has none,
    and a token that was rejected as not finite does not count."""

    token_weights: Mapping[Term, Tensor] = field(default_factory=dict)
    """Weights of each token in a term of the loss; 1 in a missing term."""

    # Scored: the values that stay fixed in all optimizer steps of a rollout.

    advantages: Tensor = field(default_factory=_later)
    """Advantages, after a penalty."""

    old_log_probs: Tensor | None = None
    """Log-probabilities under the policy before the first step; None where the loss's own forward pass
    gives them."""

    ref_log_probs: Tensor | None = None
    """Log-probabilities under the reference model; None without a KL penalty in the loss."""

    kl: Tensor | None = None
    """KL of the engine's distributions to those of the policy before the first step, as in `TokenBatch`;
    None unless a rule rejects by it."""

    old_values: Tensor | None = None
    """Values of the critic before its first step; None without a critic."""

    returns: Tensor | None = None
    """Targets of the critic; None without a critic."""

    # Weighed: each token's part in the loss.

    shares: Tensor = field(default_factory=_later)
    """Share of each token in the mean over the global batch."""

    kept: Tensor = field(default_factory=_later)
    """Tokens that no correction rejected, bool."""

    importance_weights: Tensor = field(default_factory=_later)
    """Factor of each token's policy loss: 1 without a correction."""

    correction: CorrectionConfig | None = None
    """Weights and rejection that the loss computes from its own log-probabilities, where the policy's
    were not computed before."""

    custom: CustomCorrection | None = None
    """Correction by the user's own function."""

    centering: CorrectionConfig | None = None
    """Weights of score centering; None: the loss is not centered."""

    centered: Tensor = field(default_factory=_later)
    """Tokens that it is over, bool, as in `Correction`."""

    @property
    def is_filler(self) -> bool:
        return not self.numbers

    @property
    def sampled(self) -> Tensor:
        """Return the tokens of samples, finite or not: bool [R], false for a filler."""
        return torch.full_like(self.mask, not self.is_filler)

    @property
    def episodes(self) -> list[int]:
        """Return the episode of each sample; -1 for a filler."""
        return [s.episode for s in self.samples]

    @property
    def response_lens(self) -> list[int]:
        return [s.trajectory.num_sampled for s in self.samples]

    @property
    def turn_lens(self) -> list[int]:
        """Return the number of tokens in each run of sampled tokens, in order."""
        flags = [np.pad(s.trajectory.sampled.array.astype(np.int8), 1) for s in self.samples]
        edges = [np.flatnonzero(np.diff(each)) for each in flags]
        return [int(n) for each in edges for n in each[1::2] - each[::2]]

    def tokens(self, train_log_probs: Tensor) -> TokenBatch:
        """Return the tokens that count, with these log-probabilities of the trainer."""
        return TokenBatch.packed(
            train_log_probs,
            self.rollout_log_probs,
            self.response_lens,
            self.mask,
            self.turn_lens,
            self.kl,
        )

    def with_weights(self, factors: Tensor, term: Term) -> Tensor:
        """Multiply factors of a term of the loss, [R], by the tokens' weights in that term."""
        weights = self.token_weights.get(term)
        return factors if weights is None else factors * weights

    def with_own_cut(self, cut: Cut | None, model: ModelConfig, *, always: bool) -> Self:
        """Return the batch with the requirement that tokens of the current policy lie within the
        sampling filters' cut and their grammars, by the model's tokenizer.

        always: as in `PackedTokens.with_own_cut`.
        """
        allowed = allowed_sets([s.trajectory for s in self.samples], model)
        fresh, always = self.lags == 0, always and not self.is_filler
        packed = self.packed.with_own_cut(cut, fresh, allowed, always=always)
        return replace(self, packed=packed)

    def locate(self, row: int) -> tuple[Sample, int]:
        """Return the sample of sampled token `row`, and the number of its tokens before that row."""
        for sample, length in zip(self.samples, self.response_lens, strict=True):
            if row < length:
                return sample, row
            row -= length
        raise IndexError(row)


CustomCorrection = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""(loss [R], its log-probabilities [R], detached, micro-batch) -> (loss [R], mask [R], metrics)."""


def packed_batch(
    numbered: Mapping[int, Sample], device: torch.device, shares_prefixes: bool = False
) -> MicroBatch:
    """Pack these samples, by their numbers, into the first stage of a micro-batch; without samples, a
    filler."""
    samples = list(numbered.values()) or [_FILLER]
    trajectories = [s.trajectory for s in samples]
    log_probs = torch.from_numpy(np.concatenate([t.rollout_log_probs for t in trajectories]))
    digests = [x for t in trajectories for x in t.row_digests or [NO_DIGEST] * t.num_sampled]
    packed = PackedTokens.pack(
        [t.token_ids for t in trajectories],
        [t.sampled for t in trajectories],
        [t.temperatures for t in trajectories],
        [t.routed_experts for t in trajectories],
        [t.kept_tokens for t in trajectories],
        [t.images for t in trajectories],
    )
    if shares_prefixes:
        packed = share_prefixes(packed)
    return MicroBatch(
        packed=packed.on(device),
        samples=samples,
        numbers=list(numbered),
        rollout_log_probs=log_probs.to(device),
        rollout_digests=torch.tensor(digests, dtype=torch.int64, device=device),
        lags=torch.from_numpy(np.concatenate([s.lags for s in samples])).to(device),
        mask=torch.full((len(log_probs),), bool(numbered), device=device),
        token_weights=_token_weights(samples, device),
    )


def _token_weights(samples: Sequence[Sample], device: torch.device) -> dict[Term, Tensor]:
    said = [(s.token_weights, s.trajectory.num_sampled) for s in samples]
    numbers = {
        term: [x for weights, count in said for x in weights.get(term, [1.0] * count)]
        for term in sorted({term for weights, _ in said for term in weights})
    }
    return {
        term: torch.tensor(each, dtype=torch.float32, device=device)
        for term, each in numbers.items()
    }


def sharing(steps: Iterable[Sequence[MicroBatch]], shares_prefixes: bool) -> dict[str, float]:
    """Return the share of tokens that all ranks compute with shared prefixes; nothing without them."""
    if not shares_prefixes:
        return {}
    batches = [batch for step in steps for batch in step]
    ours = [batch for batch in batches if not batch.is_filler]
    counts = {
        "distinct": sum(len(batch.packed.tokens) for batch in ours),
        "all": sum(len(s.trajectory.token_ids) for batch in ours for s in batch.samples),
    }
    found = distributed.count_over_data(counts, batches[0].mask.device)
    return {"train/distinct_tokens_share": found["distinct"] / found["all"]}


def completed(batch: MicroBatch, log_probs: Tensor) -> MicroBatch:
    """Fill in the fields of the third stage that depend on the loss's own log-probabilities, float32
    [R].

    A micro-batch holds whole sequences, so weights of every level work; a mean over the global batch
    does not. Raises NonfiniteError as `batch.correction` specifies.
    """
    log_probs = log_probs.detach()
    if batch.old_log_probs is None:
        batch = replace(batch, old_log_probs=log_probs)
    if batch.correction is None:
        return batch
    tokens = batch.tokens(log_probs)
    correction = correct(tokens, batch.correction, advantages=batch.advantages)
    weights = batch.importance_weights
    return replace(
        batch,
        mask=without_nonfinite(tokens, batch.correction).mask,
        kept=correction.mask,
        centered=correction.centered,
        importance_weights=weights if correction.weights is None else correction.weights,
    )
