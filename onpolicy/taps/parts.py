"""Which columns of a row a site has, where an operator computes more than one site at once.

A tensor-parallel rank of the rollout has a part of most rows. A trainer whose operator computes several
sites at once (queries, keys and values by one product) has them side by side. So what a trainer
computed is looked at part by part, each as the rollout has it, and only equals are compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Widths = tuple[tuple[int, ...], ...]
"""Columns of the tensors of a call: of its inputs, of keys and values, of its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one site on one rank has of the rows that a call is given and makes.

    Its methods give int64, the part's columns of tensor `number`, which has `width`; None: all. They
    raise LookupError if the rank has neither all nor an equal part.
    """

    rank: int = 0
    ranks: int = 1

    widths: Widths | None = None
    """What the rank has; None: all of every row."""

    fused: Tensor | None = None
    """int64: the columns of the result that are this site's; None: all."""

    pieces: int = 1
    """Parts side by side in the result, each of which is shared by the ranks: gate and up."""

    @property
    def has_store(self) -> bool:
        """Whether the rank has recorded keys and values."""
        return self.widths is None or bool(self.widths[1])

    def of_input(self, number: int, width: int) -> Tensor | None:
        return self._columns(0, number, width)

    def of_store(self, number: int, width: int) -> Tensor | None:
        return self._columns(1, number, width)

    def of_result(self, number: int, width: int) -> Tensor | None:
        if self.fused is None:
            return self._columns(2, number, width, self.pieces)
        own = self._columns(2, number, len(self.fused), self.pieces)
        return self.fused if own is None else self.fused[own]

    def _columns(self, kind: int, number: int, width: int, pieces: int = 1) -> Tensor | None:
        if self.widths is None or self.widths[kind][number] == width:
            return None
        each, part = width // pieces, self.widths[kind][number] // pieces
        # The last rank's part may be padded, as a vocabulary is, by zeros, whose digest is 0.
        if not part * (self.ranks - 1) < each <= part * self.ranks:
            raise LookupError(f"{part} columns of {each} on each of {self.ranks} ranks")
        own = torch.arange(each)[self.rank * part : (self.rank + 1) * part]
        return torch.cat([own + piece * each for piece in range(pieces)])


def cut(rows: Tensor, columns: Tensor | None) -> Tensor:
    """[n, C] -> [n, c]"""
    return rows if columns is None else rows[:, columns.to(rows.device)]
