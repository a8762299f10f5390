"""The norm of a gradient, with the same bits for any sharding and any number of threads.

Sums of integers below 2**53 are exact in float64, in any order. Every square is therefore cut into two
integers, in units relative to the largest square.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from onpolicy.ops import Operators
from onpolicy.train import distributed
from onpolicy.train.blocks import run_in_blocks

_UNIT = 2.0**30
"""Number of units of the largest square; the second integer is in units smaller by the same factor. The
sum of a block (see `onpolicy/train/blocks.py`) is below 2**53."""


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
