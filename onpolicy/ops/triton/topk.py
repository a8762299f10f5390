"""The router's choice of experts, the same whatever else is in the batch.

Row invariance: one thread block takes the largest of one row, k times; the first of equal ones wins.
(`torch.topk` sorts by other algorithms for other sizes, and they break ties differently.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.ops.triton.device import UNFUSED, next_power_of_2, whole


@triton.jit
def _topk_kernel(
    values: tl.tensor,
    indices: tl.tensor,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(values + row * SIZE + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # NaN counts as largest, as in torch
    is_left = columns < SIZE
    for i in range(K):
        largest = tl.max(tl.where(is_left, x, float("-inf")), 0)
        chosen = tl.min(tl.where(is_left & (x == largest), columns, BLOCK), 0)
        tl.store(indices + row * K + i, chosen.to(tl.int64))
        is_left = is_left & (columns != chosen)


def topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `Operators.topk`; ties go to the lowest index. Gradients flow to the values."""
    rows, size = values.shape
    indices = torch.empty(rows, k, dtype=torch.int64, device=values.device)
    if rows:
        block = next_power_of_2(size)
        _topk_kernel[(rows,)](
            whole(values.detach()),
            indices,
            SIZE=size,
            K=k,
            BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
            **UNFUSED,
        )
    return values.gather(1, indices), indices
