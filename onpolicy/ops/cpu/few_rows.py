"""The fewest rows that a product may have.

A decode step of one sequence need not multiply sixteen rows, nor a backward pass of a short one sum
over sixty-four.

From 16 rows on, a single-threaded GEMM gives a row the same bits whatever rows surround it. With
fewer it often does too (MKL on an AMD EPYC from 4 on), but no library promises it. So the first
product of each shape with fewer rows is compared with one of 16, and where a bit differs the shape
keeps 16. The result decides no bit, so it may differ between the engines' machines.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MULTIPLES = (4, 8)
"""Numbers of rows that are tried, with their multiples, in this order."""

BATCHES = (1, 3, 64)
"""Numbers of matrices in the batched sums that are tried."""

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A product `x @ weight.T + bias`: [M, K], [N, K], [N] or None -> [M, N]."""


class FewRows:
    """The tested row multiples of each shape, for one or more implementations of the product."""

    def __init__(self, enough: int, *ways: Multiply):
        """Take the number of rows, `enough`, that gives the same bits in all implementations."""
        self.enough, self._ways = enough, ways
        self._found: dict[tuple[int, int, bool], int] = {}

    def multiple(self, columns: int, k: int, has_bias: bool) -> int:
        """Return the multiple to which fewer rows than `enough` are padded in a product.

        The weight is a contiguous float32 [columns, k].
        """
        shape = columns, k, has_bias
        if shape not in self._found:
            self._found[shape] = self._try(*shape)
        return self._found[shape]

    def _try(self, columns: int, k: int, has_bias: bool) -> int:
        numbers = torch.Generator().manual_seed(0)
        x, weight, bias = (
            torch.randn(size, generator=numbers)
            for size in ((self.enough, k), (columns, k), (columns,))
        )
        given = weight, bias if has_bias else None
        whole = self._ways[0](x, *given)

        def agrees(rows: int) -> bool:
            ends = slice(rows), slice(self.enough - rows, None)
            return all(
                torch.equal(way(x[end].clone(), *given), whole[end])
                for way in self._ways
                for end in ends
            )

        for multiple in MULTIPLES:
            if all(map(agrees, range(multiple, self.enough, multiple))):
                return multiple
        return self.enough


SumInto = Callable[[Tensor, Tensor, Tensor], object]
"""An in-place sum `sums += weights.T @ rows`: [B, N, D], [B, M, N], [B, M, D]."""


def add_products(sums: Tensor, weights: Tensor, rows: Tensor) -> None:
    """Add `weights.T @ rows` to `sums`, as in `SumInto`."""
    sums.baddbmm_(weights.transpose(1, 2), rows)


class FewSummed:
    """The tested row multiples of sums over rows, which go in blocks.

    A partial block is padded with rows of zeros, or left short where they would change no bit.
    """

    def __init__(self, fewest: int, block: int, sum_into: SumInto = add_products):
        """Take the rows of a whole block, and the multiple of rows that a partial block must have."""
        self.fewest, self.block, self._sum_into = fewest, block, sum_into
        self._found: dict[tuple[int, int], bool] = {}

    def multiple(self, columns: int, *sizes: int) -> int:
        """Return the multiple to which rows are padded before sums over them.

        The operands are [M, columns] and [M, D] with D from `sizes`.
        """
        return self.fewest if all(self._ends(columns, size) for size in sizes) else self.block

    def _ends(self, columns: int, size: int) -> bool:
        """Return whether rows of zeros at the end of a block change no bit."""
        key = columns, size
        if key not in self._found:
            counts = range(self.fewest, self.block, self.fewest)
            self._found[key] = all(self._agrees(*key, b, n) for b in BATCHES for n in counts)
        return self._found[key]

    def _agrees(self, columns: int, size: int, batch: int, count: int) -> bool:
        numbers = torch.Generator().manual_seed(count)
        shapes = (columns, size), (self.block, columns), (self.block, size)
        sums, weights, rows = (torch.randn(batch, *x, generator=numbers) for x in shapes)
        weights[:, count:], rows[:, count:] = 0, 0
        few = sums.clone()
        self._sum_into(sums, weights, rows)
        self._sum_into(few, *(x[:, :count].contiguous() for x in (weights, rows)))
        return torch.equal(few, sums)
