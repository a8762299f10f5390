"""The matrix products of linears on a CPU, and their thread pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.ops.cpu.few_rows import FewRows
from onpolicy.ops.cpu.threads import PiecePool

ROW_MULTIPLE, MAX_ROWS = 16, 1024
COLUMNS, BFLOAT16_COLUMNS, COLUMN_MULTIPLE = 512, 256, 16

AMX_ROWS = 64
"""Number of rows of every AMX product, since oneDNN's AMX kernels cut K by the number of rows. With
128, 16 rows of a decode step are slower than without AMX (1.3 times 64's time); with 32, larger
products are (0.7 times 64's speed). Measured on one thread of an Intel Xeon with AMX, K = 1,024."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Gemms:
    """A thread pool, and the product that its GEMMs compute."""

    pool: PiecePool

    multiplied: torch.dtype = torch.float32
    """Operand dtype where x and the result have it too (bfloat16); other operands are widened to
    float32."""

    product: Product = F.linear
    """`x @ weight.T + bias`: [M, K], [N, K], [N] or None -> [M, N]."""

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
