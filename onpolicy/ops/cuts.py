"""Top-k, top-p and min-p: the tokens that a distribution is cut to, and what it is then.

The order is that of transformers' `generate`: temperature, then the k likeliest, then of those the
likeliest until they have p of *their* probability (the token that reaches it included), then of those
all that are at least min_p times as likely as the likeliest. Of equally likely tokens the one with the
smaller id comes first. (SGLang's own sampler measures top-p against the whole vocabulary: another cut
where top-k is given too.) What a grammar does not allow is cut off before all of it. What is left has
`Operators.log_softmax` of its logits, the others a logit of no weight.
Row invariance: probabilities are added as whole numbers, whose sum no order of additions changes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onpolicy.ops.base import Operators

OUTSIDE = -1e30
"""The logit of a token that was cut off: its probability is 0 to the bit at every temperature that is
allowed, and unlike infinity it makes no NaN of 0 x log 0."""

ALL = 1 << 30
"""A top-k that cuts nothing, as SGLang has it."""

_UNITS = 2.0**52
"""Whole numbers that a probability of 1 is counted as; a row's sum stays far below 2**63."""

_NUMBERS = 1 << 22
"""Numbers that are sorted at a time: 32 MiB of ids."""


class Cut(NamedTuple):
    """What is cut off; of each of M rows, or of all alike."""

    top_k: Tensor
    """int64 [M, 1] or [1, 1], at least 1; from V on it cuts nothing"""

    top_p: Tensor
    """float32, likewise: above 0; 1 cuts nothing"""

    min_p: Tensor
    """float32, likewise: from 0, which cuts nothing, to 1"""

    @staticmethod
    def of(
        top_k: int, top_p: float, min_p: float, device: torch.device | str = "cpu"
    ) -> Cut | None:
        """The same for all rows; None where nothing is cut. top_k: -1 for none."""
        if (top_k, top_p, min_p) == (-1, 1.0, 0.0):
            return None
        return Cut(
            torch.tensor([[ALL if top_k == -1 else top_k]], device=device),
            torch.tensor([[top_p]], dtype=torch.float32, device=device),
            torch.tensor([[min_p]], dtype=torch.float32, device=device),
        )

    def kept(self, operators: Operators, log_probs: Tensor) -> Tensor:
        """The tokens that are left of float32 [M, V]: bool [M, V], at least one in each row."""
        step = max(1, _NUMBERS // log_probs.shape[1])
        parts = []
        for start in range(0, len(log_probs), step):
            rows = slice(start, start + step)
            settings = (x if len(x) == 1 else x[rows] for x in self)
            parts.append(_kept(operators, log_probs[rows], *settings))
        return torch.cat(parts)


def _kept(
    operators: Operators, log_probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    # Stable: of equal numbers the first stays first.
    ordered, ids = log_probs.sort(dim=-1, descending=True, stable=True)
    probabilities = operators.elementwise(torch.exp, ordered.double())
    is_kept = torch.arange(log_probs.shape[1], device=ids.device) < top_k
    counted = (probabilities * _UNITS).round().long() * is_kept
    sums = counted.cumsum(-1)
    is_kept = is_kept & ((sums - counted < top_p * sums[:, -1:].double()) | (top_p >= 1))
    is_kept &= probabilities >= min_p * probabilities[:, :1]
    return torch.zeros_like(is_kept).scatter_(1, ids, is_kept)


def left(
    operators: Operators,
    logits: Tensor,
    temperature: Tensor,
    allowed: Tensor | None,
    cut: Cut | None,
) -> Tensor | None:
    """What a cut leaves of those logits [M, V] that are `allowed`: bool [M, V]; None if nothing is cut.

    temperature: float32 [M, 1]; allowed: bool [M, V], at least one in each row; None: all.
    """
    if cut is None:
        return allowed
    if allowed is not None:
        logits = within(logits, allowed)
    kept = cut.kept(operators, operators.log_softmax(logits, temperature))
    return kept if allowed is None else kept & allowed


def within(logits: Tensor, kept: Tensor) -> Tensor:
    """[M, V] with `OUTSIDE` where bool [M, V] is false."""
    return logits.masked_fill(~kept, OUTSIDE)
