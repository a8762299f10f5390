"""Token-by-token comparison: whether two float32 log-probabilities have the same bits (NaN and Inf
never match), and whether a sampled token is the one that its seed draws."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from onpolicy.errors import ParityError

NOT_FINITE_ULP = 1 << 31
"""ULP distance reported where a value is not finite."""


@dataclass(slots=True, kw_only=True)
class ParityCounts:
    """Sums over compared tokens; adding two merges them."""

    num_compared: int = 0
    num_mismatched: int = 0
    max_ulp: int = 0
    max_abs_diff: float = 0.0
    sum_abs_diff: float = 0.0
    sum_k3: float = 0.0
    max_k3: float = 0.0

    num_redrawn: int = 0
    """Number of sampled tokens that the trainer drew again."""

    num_drawn_otherwise: int = 0
    """Number of redrawn tokens for which the trainer drew another token."""

    num_compared_rows: int = 0
    """Number of sampled tokens whose distributions over the whole vocabulary were compared."""

    num_mismatched_rows: int = 0

    def __add__(self, other: ParityCounts) -> ParityCounts:
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        merged = {name: max(x) if name.startswith("max_") else sum(x) for name, x in pairs.items()}
        return ParityCounts(**merged)

    @property
    def mean_k3(self) -> float:
        """Return the mean k3 estimate of a token; 0 if nothing was compared."""
        return self.sum_k3 / max(self.num_compared, 1)

    def report(self) -> dict[str, float]:
        """Return the numbers that a command prints about a comparison."""
        return {
            "num_compared_tokens": self.num_compared,
            "num_mismatched_tokens": self.num_mismatched,
            "max_abs_diff": self.max_abs_diff,
            "max_ulp": self.max_ulp,
            "k3_kl_mean": self.mean_k3,
        }

    def draws(self, before: str = "") -> dict[str, float]:
        """Return the counts of redrawn tokens, and of rows if any were compared, under names with the
        prefix `before`."""
        rows = {
            f"{before}num_compared_rows": self.num_compared_rows,
            f"{before}num_mismatched_rows": self.num_mismatched_rows,
        }
        return {
            f"{before}num_redrawn_tokens": self.num_redrawn,
            f"{before}num_drawn_otherwise_tokens": self.num_drawn_otherwise,
            **(rows if self.num_compared_rows else {}),
        }

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a training step; `onpolicy/outputs/meanings.py` describes them. Without
        a compared token there are no distances, since a 0 would say that the engines agree."""
        counts: dict[str, float] = {
            "parity/num_compared_tokens": self.num_compared,
            "parity/num_mismatched_tokens": self.num_mismatched,
        }
        if not self.num_compared:
            return counts
        return {
            **counts,
            "parity/max_ulp": self.max_ulp,
            "train/train_rollout_logprob_abs_diff": self.sum_abs_diff / self.num_compared,
            "train/k3_kl": self.mean_k3,
        }


def compare_log_probs(train: Tensor, rollout: Tensor) -> tuple[ParityCounts, int | None]:
    """Compare two float32 tensors [R] as bits, so that -0.0 is not 0.0. Returns the counts and the
    position of the first mismatch, None if there is none. A value that is not finite is a mismatch
    even when both sides have it, and enters the averages unchanged. Raises ParityError for tensors
    of different shapes and for empty ones, since neither was compared."""
    if train.dtype != torch.float32 or rollout.dtype != torch.float32:
        raise TypeError(f"train {train.dtype}, rollout {rollout.dtype}: both must be float32")
    if train.shape != rollout.shape or train.dim() != 1 or not len(train):
        raise ParityError(
            f"train={list(train.shape)}, rollout={list(rollout.shape)} log-probabilities: both sides "
            "must have one of each sampled token, and there must be tokens, or nothing was compared. "
            "An engine answered without tokens, or the trainer lost some: report it."
        )
    mismatched = mismatches(train, rollout)
    diff, k3s = train.double() - rollout.double(), k3(train, rollout)
    counts = ParityCounts(
        num_compared=len(train),
        num_mismatched=int(mismatched.sum()),
        max_ulp=int(ulp_distance(train, rollout).max()),
        max_abs_diff=float(diff.abs().max()),
        sum_abs_diff=float(diff.abs().sum()),
        sum_k3=float(k3s.sum()),
        max_k3=float(k3s.max()),
    )
    return counts, int(mismatched.nonzero()[0]) if counts.num_mismatched else None


def k3(train: Tensor, rollout: Tensor) -> Tensor:
    """Return the k3 estimator of KL(rollout || train) of each token: exp(r) - r - 1, r = train -
    rollout. float32 [R], [R] -> float64 [R], in nats (http://joschu.net/blog/kl-approx.html)."""
    diff = train.double() - rollout.double()
    return diff.exp() - diff - 1


def mismatches(train: Tensor, rollout: Tensor) -> Tensor:
    """Return where two float32 tensors differ in bits or are not finite: [R], [R] -> bool [R]. -0.0 and
    0.0 differ."""
    bits, others = (x.contiguous().view(torch.int32) for x in (train, rollout))
    return (bits != others) | ~train.isfinite() | ~rollout.isfinite()


def compare_draws(drawn: Tensor, sampled: Tensor) -> tuple[ParityCounts, int | None]:
    """Compare sampled tokens, int64 [R], with the tokens that the trainer drew with their seeds.
    drawn: float32 [R], NaN for tokens that were not redrawn, which are not counted. Returns the
    counts and the position of the first token that was drawn differently, None if there is none.
    Raises ParityError for tensors of different shapes."""
    if drawn.shape != sampled.shape:
        raise ParityError(
            f"drawn={list(drawn.shape)}, sampled={list(sampled.shape)} tokens: the trainer draws each "
            "sampled token once, or not at all. It lost some: report it."
        )
    redrawn = ~drawn.isnan()
    otherwise = redrawn & (drawn.double() != sampled)
    counts = ParityCounts(num_redrawn=int(redrawn.sum()), num_drawn_otherwise=int(otherwise.sum()))
    return counts, int(otherwise.nonzero()[0]) if counts.num_drawn_otherwise else None


def compare_rows(train: Tensor, rollout: Tensor) -> tuple[ParityCounts, int | None]:
    """Compare digests of rows of log-probabilities, int64 [R]; NO_DIGEST (`ops/row_digests.py`) equals
    none.

    Returns the counts and the position of the first mismatch, None if there is none. Raises ParityError
    for tensors of different shapes.
    """
    if train.shape != rollout.shape:
        raise ParityError(
            f"train={list(train.shape)}, rollout={list(rollout.shape)} digests: both sides must have "
            "one of each sampled token's row. An engine digested none, or the trainer lost some: "
            "report it."
        )
    differ = (train != rollout) | (train == 0)
    counts = ParityCounts(num_compared_rows=len(train), num_mismatched_rows=int(differ.sum()))
    return counts, int(differ.nonzero()[0]) if counts.num_mismatched_rows else None


def two_digests(token: int, train: int, rollout: int) -> str:
    """Describe a token whose row differs, for messages."""
    said = [f"{each % (1 << 64):016x}" if each else "none" for each in (rollout, train)]
    return f"token={token}, rollout={said[0]}, train={said[1]} (none: nobody digested it, or NaN)"


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Count the representable float32 values between two tensors: float32 [...], [...] -> int64
    [...]."""
    distance = (_ordered(a) - _ordered(b)).abs()
    return torch.where(a.isfinite() & b.isfinite(), distance, NOT_FINITE_ULP)


def _ordered(x: Tensor) -> Tensor:
    """Map floats to integers in the same order, so that neighbours differ by one; both zeros are 0."""
    bits = x.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
