"""The norm of a gradient, with the same bits for any sharding and any number of threads.

Sums of integers below 2**53 are exact in float64, in any order. Every square is therefore cut into two
integers, in units relative to the largest square.

The operators' threads take a large tensor a block at a time (`run_in_blocks`), since several passes
over a block in a core's cache cost little more than one. A block is a multiple of a kernel's vector
length, so each element meets the same code, vectorised or scalar, as in the whole tensor: elementwise
functions give the same bits on any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from onpolicy.ops import Operators
from onpolicy.ops.base import Piece
from onpolicy.training import distributed

BLOCKS = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Number of elements of a block; on a CPU, a few blocks of 256 KiB in float32 fit a core's cache."""

WORK = 10.0
"""Floating-point operations per element, roughly."""

_UNIT = 2.0**30
"""Number of units of the largest square; the second integer is in units smaller by the same factor. The
sum of a block (`BLOCKS`) is below 2**53."""


def global_norm(
    shards: Sequence[Tensor], operators: Operators, group: dist.ProcessGroup | None = None
) -> float:
    """Return the 2-norm of all float32 tensors of all ranks of `group`, by default of all ranks;
    collective.

    The norm is not finite if one of the elements is not.
    """
    shards = [x for x in shards if x.numel()]
    peaks: list[Tensor] = []
    run_in_blocks(operators, [(lambda x: peaks.append(x.abs().max()), [x]) for x in shards])
    # One stacked tensor, so that the host waits for the device once.
    ours = float(torch.stack(peaks).max()) if peaks else 0.0
    largest = _largest(distributed.gather(ours, group))
    if not math.isfinite(largest) or largest == 0:
        return largest
    # A power of two as the common scale is exact, and brings every element below 1.
    _, exponent = math.frexp(largest)
    sums: list[Tensor] = []

    def add(block: Tensor) -> None:
        sums.append(_exact_sums(block, 2.0**-exponent))

    run_in_blocks(operators, [(add, [x]) for x in shards])
    mine = torch.cat(sums).tolist() if sums else []
    everyones = chain.from_iterable(distributed.gather(mine, group))
    return math.sqrt(math.fsum(everyones)) * 2.0**exponent


def _largest(values: Sequence[float]) -> float:
    """Return the largest value; NaN if one is NaN."""
    return float(torch.tensor(values, dtype=torch.float64).max())


def _exact_sums(block: Tensor, scale: float) -> Tensor:
    """Return float64 [2], together the sum of squares of a float32 [n] times `scale`, a power of two."""
    squares = (block.double() * scale).square_().mul_(_UNIT)
    high = squares.floor()
    low = squares.sub_(high).mul_(_UNIT).round_()
    return torch.stack([high.sum() / _UNIT, low.sum() / _UNIT / _UNIT])


def run_in_blocks(
    operators: Operators, work: Sequence[tuple[Callable[..., None], Sequence[Tensor]]]
) -> None:
    """Call each function on every block of its tensors: contiguous, of one size, this rank's part.

    Blocks are independent and run in no particular order.
    """
    pieces = [
        piece for function, tensors in work for piece in _pieces(function, [*map(_flat, tensors)])
    ]
    operators.run_pieces(pieces, WORK * sum(_flat(tensors[0]).numel() for _, tensors in work))


def _pieces(function: Callable[..., None], tensors: Sequence[Tensor]) -> list[Piece]:
    size = BLOCKS[tensors[0].device.type]

    def piece(start: int) -> None:
        function(*(x[start : start + size] for x in tensors))

    return [lambda start=start: piece(start) for start in range(0, tensors[0].numel(), size)]  # type: ignore[misc]


def _flat(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach().view(-1)
