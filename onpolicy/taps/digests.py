"""Digests of what a call is given and makes: of every row, or of a part's columns of every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onpolicy.ops.layouts import AttentionLayout, PagedLayout
from onpolicy.taps.parts import cut
from onpolicy.taps.rows import by_row, digest, odd_numbers

Columns = Callable[[int, int], Tensor | None]
"""(number of a tensor, its columns) -> int64: those wanted; None: all."""


class Tensors:
    """Some tensors of one call, whose rows have keys."""

    def __init__(self, tensors: Sequence[Tensor], count: int, expert_order: Tensor | None = None):
        """count: rows with a key; expert_order: int64 [count * k], the (token, choice) of each row
        where experts have sorted them."""
        self._count, self._order = count, expert_order
        self._tensors = [self._flat(x) for x in tensors]
        self._whole: dict[int, Tensor] = {}

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(rows.shape[1] for rows in self._tensors)

    def digest(self, columns: Columns) -> Tensor:
        """int64 [count]: of all tensors."""
        total = torch.zeros(self._count, dtype=torch.int64)
        for number, width in enumerate(self.widths):
            part = self._digest(number, columns(number, width))
            total = total * 0x5851F42D4C957F2D + part + number
        return total

    def _digest(self, number: int, columns: Tensor | None) -> Tensor:
        if columns is not None:
            return self._by_token(digest(cut(self._tensors[number], columns)))
        if number not in self._whole:
            self._whole[number] = self._by_token(digest(self._tensors[number]))
        return self._whole[number]

    def _flat(self, x: Tensor) -> Tensor:
        x = x.detach()
        rows = x if self._is_sorted(x) else by_row(x, self._count)
        return rows.reshape(len(rows), -1)

    def _is_sorted(self, x: Tensor) -> bool:
        return self._order is not None and len(x) == len(self._order)

    def _by_token(self, digests: Tensor) -> Tensor:
        order = self._order
        if order is None or len(digests) != len(order):
            return digests
        chosen = len(order) // self._count
        parts = digests * odd_numbers(chosen)[order % chosen]
        return torch.zeros(self._count, dtype=torch.int64).index_add_(0, order // chosen, parts)


class Store:
    """The keys and values of a call of attention."""

    def __init__(self, k: Tensor, v: Tensor, layout: AttentionLayout | PagedLayout):
        if isinstance(layout, PagedLayout):
            k, v, layout = k.flatten(0, 1), v.flatten(0, 1), layout.by_rows()
        self._layout = layout
        pairs = zip(layout.key_rows, layout.key_lens, strict=True)
        rows = torch.cat([where[:n] for where, n in pairs])
        self._seen = [x[rows].flatten(1) for x in (k, v)]

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(x.shape[1] for x in self._seen)

    def digest(self, columns: Columns) -> Tensor:
        """int64 [T]: of the keys and values of all positions up to each query's own."""
        k, v = (digest(cut(x, columns(n, x.shape[1]))) for n, x in enumerate(self._seen))
        lens = self._layout.key_lens
        odd = odd_numbers(max(lens))
        each = (k * 0x2545F4914F6CDD1D + v).split(list(lens))
        sums = [(part * odd[: len(part)]).cumsum(0) for part in each]
        ends = zip(sums, self._layout.query_lens, strict=True)
        return torch.cat([s[len(s) - n :] for s, n in ends])
