"""Kernels of a mixture of experts: the router's top k, and linears of all experts in one launch.

Row invariance: one thread block takes the largest element of one row, k times; of equal ones the
first wins. (`torch.topk` sorts by other algorithms for other sizes, and they break ties
differently.) Rows of one expert are cut into tiles that start at the expert's first row, and each
output is the same chain of sums over K as in `linear`. The device computes from the offsets which
tile a thread block has; the grid depends on sizes alone, so CUDA graphs can hold it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.ops.triton.device import UNFUSED, next_power_of_2, whole
from onpolicy.ops.triton.linear import GROUP, HALF_INNER, Tile, choose_tile, multiply_tile, tile_of


@triton.jit
def _grouped_linear_kernel(
    x: tl.tensor, weight: tl.tensor, offsets: tl.tensor, out: tl.tensor, N: tl.tensor, K: tl.tensor,
    stride_xm: tl.tensor, stride_xk: tl.tensor,
    stride_we: tl.tensor, stride_wn: tl.tensor, stride_wk: tl.tensor,
    source: tl.tensor, target: tl.tensor, PER_SOURCE: tl.constexpr, HAS_TARGET: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
) -> None:  # fmt: skip
    # The expert of a row tile is the number of experts whose tiles all come before it.
    experts = tl.arange(0, EXPERTS_BLOCK)
    is_expert = experts < EXPERTS
    starts = tl.load(offsets + experts, mask=is_expert, other=0)
    ends = tl.load(offsets + experts + 1, mask=is_expert, other=0)
    tiles = (ends - starts + ROWS - 1) // ROWS
    tiles_up_to = tl.cumsum(tiles, 0)
    column_tiles = tl.cdiv(N, COLUMNS)
    row_tiles = tl.num_programs(0) // column_tiles
    tile, column_tile = tile_of(tl.program_id(0), row_tiles, column_tiles, GROUP)
    expert = tl.sum((tiles_up_to <= tile).to(tl.int32), 0)
    if expert >= EXPERTS:  # the grid has room for the worst distribution of rows
        return
    tile -= tl.sum(tl.where(experts < expert, tiles, 0), 0)
    first = tl.load(offsets + expert) + tile * ROWS
    rows = first + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < tl.load(offsets + expert + 1), columns < N
    inputs = rows
    if PER_SOURCE:
        inputs = tl.load(source + rows, mask=is_row, other=0) // PER_SOURCE
    total = multiply_tile(
        x, weight + expert.to(tl.int64) * stride_we,
        inputs * stride_xm, is_row, columns.to(tl.int64) * stride_wn, is_column,
        K, stride_xk, stride_wk, ROWS, COLUMNS, INNER,
    )  # fmt: skip
    if HAS_TARGET:
        rows = tl.load(target + rows, mask=is_row, other=0)
    out += rows[:, None] * N + columns[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def tiled_grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    *,
    source: Tensor | None = None,
    per_source: int = 0,
    target: Tensor | None = None,
) -> Tensor:
    """Apply `tiled_linear` to every expert's rows: [S, K], [E, N, K], int64 [E + 1] -> [S, N].

    Row i is read from row `source[i] // per_source` of `x` and written to row `target[i]` of the
    result, where these are given: int64 [S].
    """
    x = x.to(weight.dtype)  # a gradient may be float32
    (E, N, K), S = weight.shape, len(x if source is None else source)
    out = x.new_empty(S, N, dtype=out_dtype)
    tile = choose_tile(x, S / E, N * E)
    # Every expert that has rows has at most one tile that is not full.
    row_tiles = S // tile.rows + min(E, S)
    if S:
        _grouped_linear_kernel[(row_tiles * triton.cdiv(N, tile.columns),)](
            x, weight, offsets, out, N, K, *x.stride(), *weight.stride(),
            source, target, PER_SOURCE=per_source, HAS_TARGET=target is not None,
            EXPERTS=E, EXPERTS_BLOCK=next_power_of_2(E), GROUP=GROUP, **tile.options(),
        )  # fmt: skip
    return out


@triton.jit
def _grouped_weight_grad_kernel(
    grad: tl.tensor, x: tl.tensor, offsets: tl.tensor, out: tl.tensor, N: tl.tensor, K: tl.tensor,
    stride_gm: tl.tensor, stride_gn: tl.tensor, stride_xm: tl.tensor, stride_xk: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
) -> None:  # fmt: skip
    expert = tl.program_id(2)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(first, end, INNER):
        rows = start + tl.arange(0, INNER).to(tl.int64)
        left = tl.load(
            grad + rows[None, :] * stride_gm + n[:, None] * stride_gn,
            mask=(rows[None, :] < end) & (n[:, None] < N),
            other=0.0,
        )
        right = tl.load(
            x + rows[:, None] * stride_xm + k[None, :] * stride_xk,
            mask=(rows[:, None] < end) & (k[None, :] < K),
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    out += (expert.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=(n[:, None] < N) & (k[None, :] < K))


def grouped_weight_grad(grad: Tensor, x: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute every expert's `grad.T @ x` over its rows, in order: [S, N], [S, K] -> [E, N, K].

    An expert without rows gets zeros.
    """
    grad = grad.to(x.dtype)
    N, K, E = grad.shape[1], x.shape[1], len(offsets) - 1
    out = x.new_empty(E, N, K, dtype=dtype)
    half = x.dtype != torch.float32
    size = 128 if half else 64
    tile = Tile(size, size, HALF_INNER // 2 if half else 16, warps=8 if half else 4, stages=3)
    _grouped_weight_grad_kernel[triton.cdiv(N, size), triton.cdiv(K, size), E](
        grad, x, offsets, out, N, K, *grad.stride(), *x.stride(), **tile.options()
    )
    return out


@triton.jit
def _topk_kernel(
    values: tl.tensor, indices: tl.tensor,
    SIZE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
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


def topk(probabilities: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compute `Operators.topk`; ties go to the lowest index. Gradients flow to the values."""
    rows, size = probabilities.shape
    indices = torch.empty(rows, k, dtype=torch.int64, device=probabilities.device)
    if rows:
        block = next_power_of_2(size)
        _topk_kernel[(rows,)](
            whole(probabilities.detach()),
            indices,
            SIZE=size,
            K=k,
            BLOCK=block,
            num_warps=max(1, min(8, block // 512)),
            **UNFUSED,
        )
    return probabilities.gather(1, indices), indices
