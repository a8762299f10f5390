"""Functions of rows over the vocabulary on a CPU, a few rows at a time.

Such a function passes over its rows several times. A few rows stay in a core's cache meanwhile,
more so where a pass overwrites the previous one, and threads share the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from onpolicy.ops.cpu.threads import PiecePool

NUMBERS = 1 << 17
"""Number of elements of a piece: 512 KiB of float32, unless a row has more."""

WORK = 50.0
"""Approximate floating-point operations per element, which is divided, exponentiated and summed."""


def few_rows(size: int) -> int:
    """Return the number of rows of `size` elements in a piece."""
    return max(1, NUMBERS // size)


def few_rows_at_a_time(pool: PiecePool, fill: Callable[..., object], *tensors: Tensor) -> None:
    """Run `fill(*tensors)`, a function that fills rows from rows, in pieces of a few rows.

    The first tensor is [M, V]; no autograd.
    """
    count, size = tensors[0].shape
    step = few_rows(size)
    if count <= step:
        fill(*tensors)
        return

    def piece(rows: slice) -> None:
        fill(*(x[rows] for x in tensors))

    pieces = [partial(piece, slice(r, r + step)) for r in range(0, count, step)]
    pool.run(pieces, WORK * count * size)


def write_few_at_a_time(
    pool: PiecePool,
    formula: Callable[..., Tensor | tuple[Tensor, ...]],
    given: Sequence[Tensor],
    *outs: Tensor,
) -> None:
    """Write the results of `formula(*given)`, a function of rows, to `outs`; no autograd.

    The first tensor is [M, V].
    """

    def fill(*rows: Tensor) -> None:
        results = formula(*rows[: len(given)])
        results = results if isinstance(results, tuple) else (results,)
        for out, result in zip(rows[len(given) :], results, strict=True):
            out.copy_(result)

    few_rows_at_a_time(pool, fill, *given, *outs)


def log_softmax(logits: Tensor, temperature: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute `Operators.log_softmax` of few contiguous rows, into `out`, float32, if given.

    It has no autograd.
    """
    wide = logits.float()
    if out is None and wide is not logits:
        out = wide
    scaled = torch.div(wide, temperature, out=out)
    return torch.log_softmax(scaled, dim=-1, out=scaled)
