"""The norm of a gradient, to the same bits however it lies on ranks and on any number of threads.

Sums of whole numbers below 2**53 are exact in float64, in any order. So every square is cut into two
of them, in units of the largest one that there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_BLOCK = 1 << 22
"""Elements that are summed at once."""

_UNIT = 2.0**30
"""Of the largest square; the second cut is in units as small again. A block's sum is below 2**53."""


def global_norm(shards: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> float:
    """2-norm of all float32 tensors of all ranks of `group`, all by default; collective.

    Not finite if one of their elements is not.
    """
    largest = _largest(_gather([_largest([float(x.abs().max()) for x in shards if len(x)])], group))
    if not math.isfinite(largest) or largest == 0:
        return largest
    _, exponent = math.frexp(largest)
    sums = [
        _exact_sums(block, 2.0**-exponent)
        for shard in shards
        for block in shard.flatten().split(_BLOCK)
    ]
    ours = torch.cat(sums).tolist() if sums else []
    return math.sqrt(math.fsum(_gather(ours, group))) * 2.0**exponent


def _largest(values: Sequence[float]) -> float:
    """NaN if one is; 0 of none."""
    return float(torch.tensor([0.0, *values], dtype=torch.float64).max())


def _exact_sums(block: Tensor, scale: float) -> Tensor:
    """float64 [2], together the sum of squares of a float32 [n] times `scale`, a power of two."""
    squares = (block.double() * scale).square_().mul_(_UNIT)
    high = squares.floor()
    low = squares.sub_(high).mul_(_UNIT).round_()
    return torch.stack([high.sum() / _UNIT, low.sum() / _UNIT / _UNIT])


def _gather(ours: list[float], group: dist.ProcessGroup | None) -> list[float]:
    everyones = [ours] * dist.get_world_size(group)
    dist.all_gather_object(everyones, ours, group=group)
    return [value for theirs in everyones for value in theirs]
