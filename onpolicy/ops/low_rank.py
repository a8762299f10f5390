"""The formula by which a low-rank adapter adds to a linear's result, in all engines."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from onpolicy.ops.base import Operators
from onpolicy.ops.row_parallel import WHOLE, RowParallel


class Factors(NamedTuple):
    """The factors of an adapter of a linear [N, K], or of a tensor-parallel rank's part of one."""

    a: Tensor
    """[r, K]"""

    b: Tensor
    """[N, r]"""

    scale: float


def add_low_rank(
    operators: Operators,
    x: Tensor,
    out: Tensor,
    factors: Factors,
    row_parallel: RowParallel = WHOLE,
) -> Tensor:
    """Compute `out + scale * (x @ a.T) @ b.T`, rounded once, in the dtype of out.

    x: [..., K]; out: [..., N] -> [..., N]. Each product is rounded to the dtype of x; the sum is
    float32. `row_parallel` says how the first product is summed over K.
    """
    inner = operators.row_parallel_linear(x, factors.a, None, row_parallel)
    added = operators.linear(inner, factors.b)
    return operators.add_scaled(out, added, factors.scale)
