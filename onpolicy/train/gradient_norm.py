"""The norm of a gradient, to the same bits however it lies on ranks and on any number of threads.

Sums of whole numbers below 2**53 are exact in float64, in any order. So every square is cut into two
of them, in units of the largest one that there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from onpolicy.train import distributed

_BLOCK = 1 << 22
"""Elements that are summed at once."""

_UNIT = 2.0**30
"""Of the largest square; the second cut is in units as small again. A block's sum is below 2**53."""


def global_norm(shards: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> float:
    """2-norm of all float32 tensors of all ranks of `group`, all by default; collective.

    Not finite if one of their elements is not.
    """
    largest = _largest(distributed.gather(_largest_of(shards), group))
    if not math.isfinite(largest) or largest == 0:
        return largest
    _, exponent = math.frexp(largest)
    sums = [
        _exact_sums(block, 2.0**-exponent)
        for shard in shards
        for block in shard.flatten().split(_BLOCK)
    ]
    ours = torch.cat(sums).tolist() if sums else []
    everyones = chain.from_iterable(distributed.gather(ours, group))
    return math.sqrt(math.fsum(everyones)) * 2.0**exponent


def _largest_of(shards: Sequence[Tensor]) -> float:
    """The largest absolute value, for which a device is waited for once; 0 of none."""
    found = [x.abs().max() for x in shards if len(x)]
    return float(torch.stack(found).max()) if found else 0.0


def _largest(values: Sequence[float]) -> float:
    """NaN if one is."""
    return float(torch.tensor(values, dtype=torch.float64).max())


def _exact_sums(block: Tensor, scale: float) -> Tensor:
    """float64 [2], together the sum of squares of a float32 [n] times `scale`, a power of two."""
    squares = (block.double() * scale).square_().mul_(_UNIT)
    high = squares.floor()
    low = squares.sub_(high).mul_(_UNIT).round_()
    return torch.stack([high.sum() / _UNIT, low.sum() / _UNIT / _UNIT])
