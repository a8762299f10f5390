"""A mixture of experts in five kernels, for few tokens: order, gate and up, gate, down, sum.

Row invariance: as in `experts`, whose kernel computes both products; rows are read and written in
place, so nothing is copied in between. A token's experts are added in the router's order, each
product and sum rounded, as in ops/mixture_of_experts.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.ops.triton.device import UNFUSED
from onpolicy.ops.triton.experts import tiled_grouped_linear

MOST_ROWS = 4096
"""Number of rows up to which each is compared with every other to sort them; PyTorch sorts more."""

BLOCK, COLUMNS = 64, 1024


@triton.jit
def _order_kernel(
    experts: tl.tensor, order: tl.tensor, offsets: tl.tensor, S: tl.tensor,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the order of rows: a row's place is the number of rows before it.

    Programs cover blocks of rows, then blocks of experts.
    """
    block = tl.program_id(0)
    of_rows = tl.cdiv(S, BLOCK)
    is_of_rows = block < of_rows
    number = tl.where(is_of_rows, block, block - of_rows) * BLOCK + tl.arange(0, BLOCK)
    is_row = is_of_rows & (number < S)
    expert = tl.where(is_of_rows, tl.load(experts + number, mask=is_row, other=EXPERTS), number)
    before = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, S, BLOCK):
        others = start + tl.arange(0, BLOCK)
        other = tl.load(experts + others, mask=others < S, other=EXPERTS)
        earlier = is_of_rows & (others[None, :] < number[:, None])
        comes_before = (other[None, :] < expert[:, None]) | (
            (other[None, :] == expert[:, None]) & earlier
        )
        before += tl.sum((comes_before & (others < S)[None, :]).to(tl.int64), 1)
    tl.store(order + before, number.to(tl.int64), mask=is_row)
    tl.store(offsets + number, before, mask=(not is_of_rows) & (number <= EXPERTS))


def order_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the rows sorted by expert and then by number, and the start of each expert's rows.

    int64 [S] -> int64 [S], int64 [E + 1].
    """
    rows = len(experts)
    order, offsets = torch.empty_like(experts), experts.new_empty(num_experts + 1)
    grid = (triton.cdiv(rows, BLOCK) + triton.cdiv(num_experts + 1, BLOCK),)
    _order_kernel[grid](
        experts.contiguous(), order, offsets, rows, EXPERTS=num_experts, BLOCK=BLOCK, **UNFUSED
    )
    return order, offsets


@triton.jit
def _sum_kernel(
    rows: tl.tensor, weights: tl.tensor, out: tl.tensor,
    K: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < SIZE
    rows += token * K * SIZE + columns
    weights += token * K
    total = tl.load(rows, mask=is_column, other=0.0) * tl.load(weights).to(tl.float32)
    for choice in tl.static_range(1, K):
        row = tl.load(rows + choice * SIZE, mask=is_column, other=0.0)
        total += row * tl.load(weights + choice).to(tl.float32)
    tl.store(out + token * SIZE + columns, total.to(out.dtype.element_ty), mask=is_column)


def mix_few(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """Compute `mix_experts` for experts that this rank holds whole, without biases; no autograd.

    x: [T, H]; experts: int64 [T, k]; weights: [T, k]; gate_up: [E, 2 I, H]; down: [E, H, I]; gate:
    [T k, 2 I] -> [T k, I]. The result is [T, H] in the dtype of `x`; None for more than MOST_ROWS / k
    tokens.
    """
    if experts.numel() > MOST_ROWS:
        return None
    (tokens, k), size = experts.shape, down.shape[1]
    order, offsets = order_by_expert(experts.reshape(-1), len(down))
    hidden = gate(tiled_grouped_linear(x, gate_up, offsets, x.dtype, source=order, per_source=k))
    outputs = tiled_grouped_linear(hidden, down, offsets, torch.float32, target=order)
    weights, out = weights.contiguous(), x.new_empty(tokens, size)
    if tokens:
        _sum_kernel[tokens, triton.cdiv(size, COLUMNS)](
            outputs, weights, out, K=k, SIZE=size, COLUMNS=COLUMNS, num_warps=4, **UNFUSED
        )
    return out
