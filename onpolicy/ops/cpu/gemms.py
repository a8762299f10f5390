"""The matrix products of linears on a CPU, their thread pool, and the fewest rows they may have.

From 16 rows on, a single-threaded GEMM gives a row the same bits whatever rows surround it. With
fewer it often does too (MKL on an AMD EPYC from 4 on), but no library promises it. So the first
product of each shape with fewer rows is compared with one of 16, and where a bit differs the shape
keeps 16. Where none does, a decode step of one sequence need not multiply sixteen rows, nor a
backward pass of a short one sum over sixty-four. The result decides no bit, so it may differ
between the engines' machines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.ops.cpu.threads import PiecePool

ROW_MULTIPLE, MAX_ROWS = 16, 1024
COLUMNS, BFLOAT16_COLUMNS, COLUMN_MULTIPLE = 512, 256, 16

AMX_ROWS = 64
"""Number of rows of every AMX product, since oneDNN's AMX kernels cut K by the number of rows. With
128, 16 rows of a decode step are slower than without AMX (1.3 times 64's time); with 32, larger
products are (0.7 times 64's speed). Measured on one thread of an Intel Xeon with AMX, K = 1,024."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A product `x @ weight.T + bias`: [M, K], [N, K], [N] or None -> [M, N]."""


@dataclass(frozen=True, slots=True)
class Gemms:
    """A thread pool, and the product that its GEMMs compute."""

    pool: PiecePool

    multiplied: torch.dtype = torch.float32
    """Operand dtype where x and the result have it too (bfloat16); other operands are widened to
    float32."""

    product: Product = F.linear

    columns: int = COLUMNS
    """Number of columns of a float32 tile."""

    has_amx: bool = False
    """Whether bfloat16 is multiplied by AMX instructions."""

    few_rows: FewRows = field(init=False, repr=False)
    """The tested row multiples of float32 products."""

    def __post_init__(self) -> None:
        found = FewRows(ROW_MULTIPLE, self.product, self._into_some_columns)
        object.__setattr__(self, "few_rows", found)

    def operand(self, x: Tensor, out_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which `x` is multiplied for a result in `out_dtype`."""
        return self.multiplied if x.dtype == out_dtype == self.multiplied else torch.float32

    def row_limits(self, operand: torch.dtype) -> tuple[int, int]:
        """Return the row multiple and the maximum number of rows of a product."""
        if self.has_amx and operand == torch.bfloat16:
            return AMX_ROWS, AMX_ROWS
        return ROW_MULTIPLE, MAX_ROWS

    def row_multiple(
        self, count: int, weight: Tensor, has_bias: bool, operand: torch.dtype, blocks: int = 1
    ) -> int:
        """Return the multiple to which `count` rows are padded before the product with `weight`.

        weight: [N, K], multiplied in `blocks` of K.
        """
        multiple, _ = self.row_limits(operand)
        may_be_few = operand == torch.float32 and blocks == 1 and weight.is_contiguous()
        if count >= multiple or not may_be_few:
            return multiple
        n, k = weight.shape
        last = -(-(n % self.columns) // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        tiles = [self.columns] * (n >= self.columns) + [last] * (last > 0)
        return max(self.few_rows.multiple(tile, k, has_bias) for tile in tiles)

    @staticmethod
    def flops(count: int, weight: Tensor) -> float:
        """Return the work of a product; below 16 rows the time is bound by reading the weight."""
        return 2.0 * max(count, ROW_MULTIPLE) * weight.numel()

    def _into_some_columns(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = x.new_empty(len(x), 2 * len(weight))[:, : len(weight)]
        self.multiply_into(out, x, weight, bias)
        return out

    def multiply_into(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Write `product` to `out`; PyTorch's functions write without a copy."""
        if self.product is not F.linear:
            out.copy_(self.product(x, weight, bias))
        elif bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)


MULTIPLES = (4, 8)
"""Numbers of rows that are tried, with their multiples, in this order."""

BATCHES = (1, 3, 64)
"""Numbers of matrices in the batched sums that are tried."""


class FewRows:
    """The tested row multiples of each shape, for one or more implementations of the product."""

    def __init__(self, enough: int, *ways: Product):
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
