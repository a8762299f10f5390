"""Functions of rows of a vocabulary on a CPU, a few rows at a time.

Such a function passes over its rows several times and allocates a result in every pass. Of few rows
these stay in a core's cache, malloc has a block of their size at hand, and threads share the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from onpolicy.ops.cpu.threads import PiecePool

NUMBERS = 1 << 17
"""Numbers of a piece: 512 KiB of float32, unless a row has more."""

WORK = 50.0
"""Floating-point operations that a number costs, roughly: it is divided, exponentiated and summed."""


def few_rows(size: int) -> int:
    """How many rows of `size` numbers make a piece."""
    return max(1, NUMBERS // size)


def few_rows_at_a_time(
    pool: PiecePool,
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    outs: Sequence[Tensor],
) -> None:
    """`outs = function(*inputs)` for a function of rows, the first input [M, V]; no autograd."""
    count, size = inputs[0].shape
    step = few_rows(size)

    def piece(rows: slice) -> None:
        results = function(*(x[rows] for x in inputs))
        for out, result in zip(outs, results, strict=True):
            out[rows] = result

    pieces = [partial(piece, slice(r, r + step)) for r in range(0, count, step)]
    pool.run(pieces, WORK * count * size)
