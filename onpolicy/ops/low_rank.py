"""What a low-rank adapter adds to the result of a linear: the one formula of all engines."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from onpolicy.ops.base import Operators
from onpolicy.ops.row_parallel import WHOLE, RowParallel


class Factors(NamedTuple):
    """An adapter of a linear [N, K], or of a tensor-parallel rank's part of one."""

    a: Tensor
    """[r, K]"""

    b: Tensor
    """[N, r]"""

    scale: float


class Gain(NamedTuple):
    """What the rows of W + s B A are multiplied by (DoRA, `onpolicy/models/magnitude.py`)."""

    factor: Tensor
    """float32 [N]"""

    bias: Tensor | None
    """[N]: that of the linear, which is not multiplied"""


def add_low_rank(
    operators: Operators,
    x: Tensor,
    out: Tensor,
    factors: Factors,
    row_parallel: RowParallel = WHOLE,
    gain: Gain | None = None,
) -> Tensor:
    """`out + scale * (x @ a.T) @ b.T`, rounded once: [..., K], [..., N] -> [..., N] in the dtype of out.

    Each product is rounded to the dtype of x; the sum is taken in float32, and a `gain` is of the sum.
    `row_parallel`: how the first product is summed over K.
    """
    inner = operators.row_parallel_linear(x, factors.a, None, row_parallel)
    added = operators.linear(inner, factors.b)
    more = gain if gain is not None else ()
    return operators.add_scaled(out, added, factors.scale, *more)
