"""Top-k, top-p and min-p: the set of tokens that they keep, which travels with a sampled token.

The cut follows transformers' `generate`: temperature, then the k likeliest tokens, then the
likeliest of these until they have p of *their* probability (including the token that reaches it),
then of these all that are at least min_p times as likely as the likeliest. Of equally likely tokens
the smaller id comes first. (SGLang's own sampler measures top-p against the whole vocabulary:
another cut if top-k is given too.) Tokens that a grammar does not allow are cut off first. The kept
tokens have `Operators.log_softmax` of their logits; the others have a logit of no weight. Row
invariance: probabilities are added as integers, whose sum does not depend on the order.

A set is the little-endian int32 ids of its tokens, ascending. If that is no shorter, it is a mask
of the vocabulary, ceil(V / 8) bytes with token 0 in the first byte's highest bit. No bytes at all
stand for the whole vocabulary. Equal sets are equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.ops.base import Operators

WHOLE = b""


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The sets that the R sampled tokens of a micro-batch were drawn from."""

    sets: tuple[bytes, ...]
    """[R]"""

    cut: Cut | None = None
    """The cut that the sets must match by the model's logits; None: nothing is cut off."""

    allowed: tuple[bytes, ...] = ()
    """[R]: the set that a grammar allowed for each token; empty: the whole vocabulary for all."""

    compared: Tensor | None = None
    """bool [R]: the tokens whose set is compared with `cut` and `allowed`; None: none."""

    def at(self, rows: Tensor, missing: int = 0) -> KeptTokens:
        """Return the sets of int64 [M] tokens, and of `missing` more with the whole vocabulary."""
        sets, allowed = (
            (*(of[i] for i in rows.tolist()), *[WHOLE] * missing) if of else ()
            for of in (self.sets, self.allowed)
        )
        compared = self.compared
        if compared is not None:
            compared = F.pad(compared[rows.to(compared.device)], (0, missing))
        return replace(self, sets=sets, allowed=allowed, compared=compared)

    def cut_to(self, logits: Tensor, rows: slice) -> Tensor:
        """Return logits [M, V] of these tokens, with no weight outside their sets."""
        return within(logits, self.mask(logits, rows))

    def mask(self, logits: Tensor, rows: slice) -> Tensor:
        """Return the sets of these tokens as bool [M, V], of the logits' size."""
        return _mask(self.sets, logits, rows)

    def differ(
        self, operators: Operators, logits: Tensor, temperature: Tensor, rows: slice
    ) -> Tensor | None:
        """Return which tokens' sets differ from the one that grammar and cut keep: bool [M].

        logits: [M, V]; temperature: float32 [M, 1]. Return None if nothing is compared.
        """
        if self.compared is None:
            return None
        cut = self.cut and Cut(*(x.to(logits.device) for x in self.cut))
        with torch.no_grad():
            allowed = _mask(self.allowed, logits, rows) if self.allowed else None
            own = left(operators, logits, temperature, allowed, cut)
        compared = self.compared[rows].to(logits.device)
        mask = self.mask(logits, rows)
        return ((~mask if own is None else own != mask).any(-1)) & compared


def _mask(sets: Sequence[bytes], logits: Tensor, rows: slice) -> Tensor:
    return unpacked(sets[rows], logits.shape[1]).to(logits.device)


def packed(kept: Tensor) -> list[bytes]:
    """Return the set of each row of bool [M, V]."""
    return [_packed(row) for row in kept.cpu().numpy()]


def _packed(row: np.ndarray) -> bytes:
    count = np.count_nonzero(row)
    if count == len(row):
        return WHOLE
    if 0 < 4 * count < -(-len(row) // 8):  # no bytes are the whole vocabulary
        return np.flatnonzero(row).astype("<i4").tobytes()
    return np.packbits(row).tobytes()


def unpacked(sets: Sequence[bytes], vocab_size: int) -> Tensor:
    """Return the rows that `packed` packed: bool [M, V].

    Raise ValueError for bytes that are no set of this vocabulary.
    """
    rows = np.ones((len(sets), vocab_size), dtype=bool)
    for row, kept in zip(rows, sets, strict=True):
        if len(kept) == -(-vocab_size // 8):
            row[:] = np.unpackbits(np.frombuffer(kept, np.uint8), count=vocab_size)
        elif kept != WHOLE:
            ids = np.frombuffer(kept, dtype="<i4")
            if ids.min() < 0 or ids.max() >= vocab_size:
                raise ValueError(
                    f"kept_tokens={ids.tolist()[:8]}: ids of a vocabulary of {vocab_size} are from 0 to "
                    f"{vocab_size - 1}"
                )
            row[:] = False
            row[ids] = True
    return torch.from_numpy(rows)


OUTSIDE = -1e30
"""Logit of a token that was cut off: its probability is exactly 0 at every allowed temperature, and
unlike infinity it makes no NaN of 0 x log 0."""

ALL = 1 << 30
"""Top-k that cuts nothing, as in SGLang."""

ONE = 2.0**52
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


def counted(probabilities: Tensor) -> Tensor:
    """Return float64 probabilities as int64 multiples of 1 / ONE, whose sums have no order."""
    return (probabilities * ONE).round().long()


def _kept(
    operators: Operators, log_probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    # A stable sort: of equal numbers the smaller id stays first.
    ordered, ids = log_probs.sort(dim=-1, descending=True, stable=True)
    probabilities = operators.elementwise(torch.exp, ordered.double())
    # Top-k, then top-p by the probability before each token, then min-p.
    is_kept = torch.arange(log_probs.shape[1], device=ids.device) < top_k
    counts = counted(probabilities) * is_kept
    sums = counts.cumsum(-1)
    is_kept = is_kept & ((sums - counts < top_p * sums[:, -1:].double()) | (top_p >= 1))
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
    """Return logits [M, V] with `OUTSIDE` where bool [M, V] is False; float16, which cannot hold it, is
    widened to float32."""
    logits = logits.float() if logits.dtype == torch.float16 else logits
    return logits.masked_fill(~kept, OUTSIDE)
