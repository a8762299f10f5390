"""The set of tokens that a sampled token was drawn from, as bytes that travel with it.

A set is the little-endian int32 ids of its tokens, ascending. If that is no shorter, it is a mask
of the vocabulary, ceil(V / 8) bytes with token 0 in the first byte's highest bit. No bytes at all
stand for the whole vocabulary. Equal sets are equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.ops.base import Operators
from onpolicy.ops.cuts import Cut, left, within

WHOLE = b""


def packed(kept: Tensor) -> list[bytes]:
    """Return the set of each row of bool [M, V]; no row may be empty."""
    return [_packed(row) for row in kept.cpu().numpy()]


def _packed(row: np.ndarray) -> bytes:
    count = np.count_nonzero(row)
    if count == len(row):
        return WHOLE
    if 4 * count < -(-len(row) // 8):
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
