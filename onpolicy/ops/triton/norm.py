"""RMS norm: every row is summed by itself.

Row invariance: a row lies in one thread block whole, as a block of a size that depends on the norm's
size alone, so its squares are added along one fixed tree. Rows that share a thread block are laid
out alike and never meet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.triton.device import UNFUSED, next_power_of_2, whole

ROWS_PER_SUM = 256
"""Rows whose weight gradients are added up in one thread block."""


@triton.jit(do_not_specialize=["M"])
def _rms_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    inverse: tl.tensor,
    M: tl.tensor,
    eps: tl.float32,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND_LAST: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    offsets = rows[:, None] * SIZE + columns[None, :]
    is_element = (rows < M)[:, None] & (columns < SIZE)[None, :]
    values = tl.load(x + offsets, mask=is_element, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)
    normal = values * scale[:, None]
    if not ROUND_LAST:
        normal = normal.to(x.dtype.element_ty).to(tl.float32)
    weights = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    tl.store(out + offsets, (weights[None, :] * normal).to(out.dtype.element_ty), mask=is_element)
    tl.store(inverse + rows, scale, mask=rows < M)


@triton.jit(do_not_specialize=["M"])
def _rms_norm_grad_kernel(
    grad: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    inverse: tl.tensor,
    grad_x: tl.tensor,
    grad_weight: tl.tensor,
    M: tl.tensor,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS_PER_SUM: tl.constexpr,
    ROUND_LAST: tl.constexpr,
) -> None:
    """Gradients of ROWS_PER_SUM rows; their sum for the weight is one row of `grad_weight`."""
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS_PER_SUM
    for start in range(0, ROWS_PER_SUM, ROWS):
        rows = first + start + tl.arange(0, ROWS)
        offsets = rows[:, None] * SIZE + columns[None, :]
        is_element = (rows < M)[:, None] & is_column[None, :]
        values = tl.load(x + offsets, mask=is_element, other=0.0).to(tl.float32)
        grads = tl.load(grad + offsets, mask=is_element, other=0.0).to(tl.float32)
        scale = tl.load(inverse + rows, mask=rows < M, other=0.0)[:, None]
        normal = values * scale
        if ROUND_LAST:
            total += tl.sum(grads * normal, 0)
        else:
            total += tl.sum(grads * normal.to(x.dtype.element_ty).to(tl.float32), 0)
        grads *= weights[None, :]
        mean = tl.sum(grads * normal, 1)[:, None] / SIZE
        result = scale * (grads - normal * mean)
        tl.store(grad_x + offsets, result.to(grad_x.dtype.element_ty), mask=is_element)
    tl.store(grad_weight + tl.program_id(0) * SIZE + columns, total, mask=is_column)


def block_of(size: int) -> tuple[int, int, int]:
    """(rows of a thread block, elements of a row, warps) for norms of `size`."""
    block = next_power_of_2(size)
    rows = max(1, 2048 // block)
    return rows, block, min(16, max(4, rows * block // 1024))


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, round_last: bool = False
) -> tuple[Tensor, Tensor]:
    """transformers' RMS norm, `weight * (x * rsqrt(mean(x^2) + eps))`; no autograd.

    In float32, the product in brackets rounded to the dtype of `x`, and the result to the common dtype
    of both; or, if `round_last`, only the result, to that of `x`. Contiguous [M, D] and [D] -> ([M, D],
    float32 [M]: the reciprocal root).
    """
    M, size = x.shape
    dtype = x.dtype if round_last else torch.promote_types(x.dtype, weight.dtype)
    out = x.new_empty(M, size, dtype=dtype)
    inverse = x.new_empty(M, dtype=torch.float32)
    rows, block, warps = block_of(size)
    if M:
        _rms_norm_kernel[(triton.cdiv(M, rows),)](
            x,
            weight,
            out,
            inverse,
            M,
            eps,
            SIZE=size,
            ROWS=rows,
            BLOCK=block,
            ROUND_LAST=round_last,
            num_warps=warps,
            **UNFUSED,
        )
    return out, inverse


class TritonRMSNorm(torch.autograd.Function):
    """The weight gradient is added up in blocks of rows, then block after block."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float, round_last: bool
    ) -> Tensor:
        rows, weight = whole(x.reshape(-1, x.shape[-1])), whole(weight)
        out, inverse = rms_norm(rows, weight, eps, round_last)
        ctx.round_last = round_last  # type: ignore[attr-defined]
        ctx.save_for_backward(rows, weight, inverse)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors  # type: ignore[attr-defined]
        (M, size), sums = x.shape, triton.cdiv(x.shape[0], ROWS_PER_SUM)
        grad_x, partial = torch.empty_like(x), inverse.new_empty(sums, size)
        rows, block, warps = block_of(size)
        if M:
            _rms_norm_grad_kernel[(sums,)](
                whole(grad.reshape(M, size)),
                x,
                weight,
                inverse,
                grad_x,
                partial,
                M,
                SIZE=size,
                ROWS=rows,
                BLOCK=block,
                ROWS_PER_SUM=ROWS_PER_SUM,
                ROUND_LAST=ctx.round_last,  # type: ignore[attr-defined]
                num_warps=warps,
                **UNFUSED,
            )
        return grad_x.view(grad.shape), partial.sum(0).to(weight.dtype), None, None
