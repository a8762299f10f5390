"""Sampling by inverting the cumulative distribution, one row at a time.

Row invariance: one thread block walks one row in blocks of columns from 0, in float64, twice: for
the total and for the first token beyond the threshold. A token depends on its own log-probabilities
and its own uniform number. (`torch.cumsum` scans in other ways for other numbers of rows.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.ops.triton.device import UNFUSED, next_power_of_2, whole

MAX_BLOCK = 1024


@triton.jit
def _probabilities(log_probs: tl.tensor, columns: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    values = tl.load(log_probs + columns, mask=columns < SIZE, other=float("-inf"))
    return tl.exp(values.to(tl.float64))


@triton.jit
def _sample_kernel(
    log_probs: tl.tensor,
    uniform: tl.tensor,
    tokens: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    log_probs += row * SIZE
    total = tl.full((), 0.0, dtype=tl.float64)
    for start in range(0, SIZE, BLOCK):
        total += tl.sum(_probabilities(log_probs, start + tl.arange(0, BLOCK), SIZE), 0)
    threshold = tl.load(uniform + row) * total
    before = tl.full((), 0.0, dtype=tl.float64)
    count = tl.full((), 0, dtype=tl.int64)
    for start in range(0, SIZE, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        probabilities = _probabilities(log_probs, columns, SIZE)
        is_below = (before + tl.cumsum(probabilities, 0) <= threshold) & (columns < SIZE)
        count += tl.sum(is_below.to(tl.int64), 0)
        before += tl.sum(probabilities, 0)
    tl.store(tokens + row, tl.minimum(count, SIZE - 1))


def sample(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """See `Operators.sample`."""
    rows, size = log_probs.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=log_probs.device)
    if rows:
        block = min(MAX_BLOCK, next_power_of_2(size))
        _sample_kernel[(rows,)](
            whole(log_probs),
            uniform.contiguous(),
            tokens,
            SIZE=size,
            BLOCK=block,
            num_warps=4,
            **UNFUSED,
        )
    return tokens
