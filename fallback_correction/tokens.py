"""Batch of response tokens, sequences laid end to end, and sums that do not depend on the packing.

The log-ratios between the two engines, per token and per sequence, are here too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fallback_correction.config import CorrectionConfig, Level, WeightLevel
from fallback_correction.ranges import require_choice

Gather = Callable[[Tensor], Tensor]
"""Function that concatenates a float64 vector over the data-parallel ranks, in the same order
on each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Both engines' log-probabilities of the same tokens. N: tokens, padding included; S: sequences.

    Padded [B, T] tensors are a batch of B sequences of T tokens each: see `padded`.
    """

    train_log_probs: Tensor
    """Log-probability log pi_train of every token, float32 [N], in nats."""

    rollout_log_probs: Tensor
    """Log-probability log pi_rollout of every token, float32 [N], in nats."""

    mask: Tensor
    """Tokens that count, bool [N]."""

    lengths: Tensor
    """Number of tokens of each sequence, padding included, int64 [S]. Example: [7, 3]"""

    turns: Tensor | None = None
    """Number of tokens of each turn, in the sequences' order, int64; None: a sequence is one turn.
    Example: [4, 3, 3]"""

    kl: Tensor | None = None
    """KL of the rollout's distribution to the trainer's where each token was drawn, float32 [N], in nats
    (`score_centering.likeliest_kl`); None: not known."""

    def __post_init__(self) -> None:
        n = self.train_log_probs.shape
        same = self.rollout_log_probs.shape == self.mask.shape == n
        same &= self.kl is None or self.kl.shape == n
        if self.turns is not None:
            starts = {0, *self.turns.cumsum(0).tolist()}
            same &= starts >= {*self.lengths.cumsum(0).tolist()} and max(starts) == n[0]
        if len(n) != 1 or not same or int(self.lengths.sum()) != n[0]:
            raise ValueError(
                f"train_log_probs={tuple(n)}, rollout_log_probs={tuple(self.rollout_log_probs.shape)}, "
                f"mask={tuple(self.mask.shape)}, sum of lengths={int(self.lengths.sum())}: all must "
                "be the same number of tokens, and turns end with their sequences. Use "
                "TokenBatch.padded for [B, T] tensors."
            )

    @staticmethod
    def packed(
        train_log_probs: Tensor,
        rollout_log_probs: Tensor,
        lengths: list[int],
        mask: Tensor | None = None,
        turns: list[int] | None = None,
        kl: Tensor | None = None,
    ) -> TokenBatch:
        """Make a batch of sequences laid end to end, from three [N]; without a mask all tokens count."""
        if mask is None:
            mask = torch.ones_like(train_log_probs, dtype=torch.bool)
        return TokenBatch(
            train_log_probs=train_log_probs.detach().float(),
            rollout_log_probs=rollout_log_probs.detach().float(),
            mask=mask.bool(),
            lengths=torch.tensor(lengths, dtype=torch.int64, device=mask.device),
            turns=None
            if turns is None
            else torch.tensor(turns, dtype=torch.int64, device=mask.device),
            kl=kl,
        )

    @staticmethod
    def padded(train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> TokenBatch:
        """Make a batch from three [B, T]; results for N = B x T tokens can be viewed as [B, T] again."""
        b, t = mask.shape
        return TokenBatch.packed(
            train_log_probs.reshape(-1), rollout_log_probs.reshape(-1), [t] * b, mask.reshape(-1)
        )

    def with_turns(self) -> TokenBatch:
        """Return the batch with a turn from the first token of each run of counting tokens, as where the
        mask leaves out what tools answered."""
        begins = self.mask & ~self.mask.roll(1)
        begins[(self.lengths.cumsum(0) - self.lengths)[self.lengths > 0]] = True
        starts = begins.nonzero()[:, 0]
        ends = starts.new_tensor([len(begins)])
        return dataclasses.replace(self, turns=torch.diff(starts, append=ends))

    def by_turn(self, name: str) -> TokenBatch:
        """Return the batch with its turns for sequences, if a level or an aggregation of this name is
        over turns."""
        if not name.startswith("turn") or self.turns is None:
            return self
        return dataclasses.replace(self, lengths=self.turns, turns=None)

    @property
    def counts(self) -> Tensor:
        """Return the number of counting tokens of each sequence, float64 [S]."""
        return self.sums(torch.ones_like(self.train_log_probs))

    def sums(self, values: Tensor) -> Tensor:
        """Sum over the counting tokens of each sequence: [N] -> float64 [S].

        A sequence's sum does not depend on the other sequences.
        """
        values = torch.where(self.mask, values, 0).double()
        return torch.segment_reduce(values, "sum", lengths=self.lengths, initial=0, unsafe=True)

    def means(self, values: Tensor) -> Tensor:
        """Average over the counting tokens of each sequence, 0 where none counts: [N] -> float64 [S]."""
        return self.sums(values) / self.counts.clamp(min=1)

    def maxima(self, values: Tensor) -> Tensor:
        """Return the largest value among the counting tokens of each sequence, -inf where none
        counts."""
        values = torch.where(self.mask, values, -math.inf).double()
        return torch.segment_reduce(
            values, "max", lengths=self.lengths, initial=-math.inf, unsafe=True
        )

    def minima_before(self, values: Tensor) -> Tensor:
        """Return the smallest value among the counting tokens before each in its sequence, 0 for the
        first: [N] -> [N]."""
        parts = torch.where(self.mask, values, math.inf).split(self.lengths.tolist())
        before = [F.pad(x, (1, 0), value=math.inf)[:-1].cummin(0).values for x in parts if len(x)]
        found = torch.cat(before) if before else values
        return torch.where(found == math.inf, 0, found)

    def spread(self, values: Tensor) -> Tensor:
        """Give every token its sequence's value: [S] -> [N]."""
        return values.repeat_interleave(self.lengths, output_size=len(self.mask))


def alone(values: Tensor) -> Tensor:
    """Return the values of a single rank, as its `Gather`."""
    return values


def exact_sum(values: Tensor) -> float:
    """Return the sum of a float64 vector, rounded once, so that it is the same in any order."""
    return math.fsum(values.tolist())


def global_token_mean(
    batch: TokenBatch, values: Tensor, gather: Gather = alone, default: float = 0.0
) -> float:
    """Average [N] over the counting tokens of all ranks, to the same bits for any split."""
    total, count = exact_sum(gather(batch.sums(values))), exact_sum(gather(batch.counts))
    return total / count if count else default


def global_sequence_mean(
    batch: TokenBatch, values: Tensor, gather: Gather = alone, default: float = 0.0
) -> float:
    """Average [S] over the sequences of all ranks with a counting token."""
    some = batch.counts > 0
    total = exact_sum(gather(torch.where(some, values, 0).double()))
    count = exact_sum(gather(some.double()))
    return total / count if count else default


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


class NonfiniteError(ValueError):
    """A NaN or infinite log-probability of a token that counts."""


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
    level `none`.

    prefix-min: rho_t times the smallest rho_i, i < t (MinPRO, arXiv 2601.22718), in place of the product
    of all of them; the first token has its own rho.
    """
    require_choice("level", level, WeightLevel)
    if level == "token":
        return r
    if level == "prefix-min":
        return r + batch.minima_before(r)
    batch = batch.by_turn(level)
    per_sequence = batch.sums(r) if level in ("sequence", "turn") else batch.means(r)
    return batch.spread(per_sequence.float())


def clamped(x: Tensor, limit: float | None) -> Tensor:
    """Clamp to +- limit, if there is one."""
    return x if limit is None else x.clamp(-limit, limit)
