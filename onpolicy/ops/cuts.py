"""Top-k, top-p and min-p: the tokens that they keep of a distribution, and the distribution after.

The order follows transformers' `generate`: temperature, then the k likeliest tokens, then the
likeliest of these until they have p of *their* probability (including the token that reaches it),
then of these all that are at least min_p times as likely as the likeliest. Of equally likely tokens
the smaller id comes first. (SGLang's own sampler measures top-p against the whole vocabulary:
another cut if top-k is given too.) Tokens that a grammar does not allow are cut off first. The kept
tokens have `Operators.log_softmax` of their logits; the others have a logit of no weight. Row
invariance: probabilities are added as integers, whose sum does not depend on the order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onpolicy.ops.base import Operators

OUTSIDE = -1e30
"""Logit of a token that was cut off: its probability is exactly 0 at every allowed temperature, and
unlike infinity it makes no NaN of 0 x log 0."""

ALL = 1 << 30
"""Top-k that cuts nothing, as in SGLang."""

_UNITS = 2.0**52
"""Integer that stands for a probability of 1; a row's sum stays far below 2**63."""

_NUMBERS = 1 << 22
"""Number of elements that are sorted at a time: 32 MiB of ids."""


class Cut(NamedTuple):
    """The sampling parameters of each of M rows, or of all rows."""

    top_k: Tensor
    """int64 [M, 1] or [1, 1], at least 1; from V on it cuts nothing"""

    top_p: Tensor
    """float32 of the same shape, above 0; 1 cuts nothing"""

    min_p: Tensor
    """float32 of the same shape, from 0, which cuts nothing, to 1"""

    @staticmethod
    def of(
        top_k: int, top_p: float, min_p: float, device: torch.device | str = "cpu"
    ) -> Cut | None:
        """Return one cut for all rows; None if nothing is cut. top_k: -1 for none."""
        if (top_k, top_p, min_p) == (-1, 1.0, 0.0):
            return None
        return Cut(
            torch.tensor([[ALL if top_k == -1 else top_k]], device=device),
            torch.tensor([[top_p]], dtype=torch.float32, device=device),
            torch.tensor([[min_p]], dtype=torch.float32, device=device),
        )

    def kept(self, operators: Operators, log_probs: Tensor) -> Tensor:
        """Return the kept tokens of float32 [M, V]: bool [M, V], at least one in each row."""
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
    # A stable sort: of equal numbers the smaller id stays first.
    ordered, ids = log_probs.sort(dim=-1, descending=True, stable=True)
    probabilities = operators.elementwise(torch.exp, ordered.double())
    # Top-k, then top-p by the probability before each token, then min-p.
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
    """Return the `allowed` tokens that a cut keeps: bool [M, V]; None if nothing is cut.

    logits: [M, V]; temperature: float32 [M, 1]; allowed: bool [M, V], at least one in each row;
    None: all tokens.
    """
    if cut is None:
        return allowed
    if allowed is not None:
        logits = within(logits, allowed)
    kept = cut.kept(operators, operators.log_softmax(logits, temperature))
    return kept if allowed is None else kept & allowed


def within(logits: Tensor, kept: Tensor) -> Tensor:
    """Return logits [M, V] with `OUTSIDE` where bool [M, V] is False."""
    return logits.masked_fill(~kept, OUTSIDE)
