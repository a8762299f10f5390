"""RMS norm and layer norm, where every row is summed by itself.

Row invariance: a whole row lies in one thread block, as a block of a size that depends only on the
norm's size, so it is added along one fixed tree. Rows that share a thread block have the same
layout and never meet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.triton.device import UNFUSED, next_power_of_2, whole

ROWS_PER_SUM = 256
"""Number of rows whose parameter gradients one thread block adds up."""


@triton.jit(do_not_specialize=["M"])
def _norm_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor,
    out: tl.tensor, means: tl.tensor, inverse: tl.tensor, M: tl.tensor, eps: tl.float32,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CENTERED: tl.constexpr, ROUND_LAST: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    offsets = rows[:, None] * SIZE + columns[None, :]
    is_column = columns < SIZE
    is_element = (rows < M)[:, None] & is_column[None, :]
    values = tl.load(x + offsets, mask=is_element, other=0.0).to(tl.float32)
    if CENTERED:
        mean = tl.sum(values, 1) / SIZE
        values = tl.where(is_element, values - mean[:, None], 0.0)
        tl.store(means + rows, mean, mask=rows < M)
    scale = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)
    tl.store(inverse + rows, scale, mask=rows < M)
    normal = values * scale[:, None]
    if not ROUND_LAST:
        normal = normal.to(x.dtype.element_ty).to(tl.float32)
    result = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, :] * normal
    if CENTERED:
        result += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=is_element)


@triton.jit(do_not_specialize=["M"])
def _norm_grad_kernel(
    grad: tl.tensor, x: tl.tensor, weight: tl.tensor, means: tl.tensor, inverse: tl.tensor,
    grad_x: tl.tensor, grad_weight: tl.tensor, grad_bias: tl.tensor, M: tl.tensor,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ROWS_PER_SUM: tl.constexpr,
    CENTERED: tl.constexpr, ROUND_LAST: tl.constexpr,
) -> None:  # fmt: skip
    """Compute gradients of ROWS_PER_SUM rows; their parameter sums are one row of the partial sums."""
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    weight_total = tl.zeros((BLOCK,), dtype=tl.float32)
    bias_total = tl.zeros((BLOCK,), dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS_PER_SUM
    for start in range(0, ROWS_PER_SUM, ROWS):
        rows = first + start + tl.arange(0, ROWS)
        offsets = rows[:, None] * SIZE + columns[None, :]
        is_element = (rows < M)[:, None] & is_column[None, :]
        values = tl.load(x + offsets, mask=is_element, other=0.0).to(tl.float32)
        grads = tl.load(grad + offsets, mask=is_element, other=0.0).to(tl.float32)
        scale = tl.load(inverse + rows, mask=rows < M, other=0.0)[:, None]
        if CENTERED:
            mean = tl.load(means + rows, mask=rows < M, other=0.0)[:, None]
            normal = tl.where(is_element, (values - mean) * scale, 0.0)
            bias_total += tl.sum(grads, 0)
        else:
            normal = values * scale
        if ROUND_LAST:
            weight_total += tl.sum(grads * normal, 0)
        else:
            weight_total += tl.sum(grads * normal.to(x.dtype.element_ty).to(tl.float32), 0)
        grads *= weights[None, :]
        along = tl.sum(grads * normal, 1)[:, None] / SIZE
        if CENTERED:
            grads -= tl.sum(grads, 1)[:, None] / SIZE
        result = scale * (grads - normal * along)
        tl.store(grad_x + offsets, result.to(grad_x.dtype.element_ty), mask=is_element)
    tl.store(grad_weight + tl.program_id(0) * SIZE + columns, weight_total, mask=is_column)
    if CENTERED:
        tl.store(grad_bias + tl.program_id(0) * SIZE + columns, bias_total, mask=is_column)


def options(size: int) -> dict[str, int]:
    """Return rows per thread block, elements per row and warps; they depend only on the norm's size."""
    block = next_power_of_2(size)
    rows = max(1, 2048 // block)
    warps = min(16, max(4, rows * block // 1024))
    return {"SIZE": size, "ROWS": rows, "BLOCK": block, "num_warps": warps}


class TritonNorm(torch.autograd.Function):
    """`Operators.rms_norm` or, with a bias, `Operators.layer_norm`, which rounds last.

    x: [..., D]; weight and bias: [D] -> [..., D]. Gradients of the parameters are added up in
    blocks of rows, then block after block.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        round_last: bool,
    ) -> Tensor:
        flat, weight = whole(x.reshape(-1, x.shape[-1])), whole(weight)
        bias = None if bias is None else whole(bias)
        (M, size), centered = flat.shape, bias is not None
        dtype = x.dtype if round_last else torch.promote_types(x.dtype, weight.dtype)
        out = flat.new_empty(M, size, dtype=dtype)
        means = flat.new_empty(M, dtype=torch.float32) if centered else None
        inverse = flat.new_empty(M, dtype=torch.float32)
        how = {"CENTERED": centered, "ROUND_LAST": round_last, **options(size), **UNFUSED}
        if M:
            _norm_kernel[(triton.cdiv(M, how["ROWS"]),)](
                flat, weight, bias, out, means, inverse, M, eps, **how
            )
        ctx.how = how  # type: ignore[attr-defined]
        ctx.save_for_backward(flat, weight, bias, means, inverse)  # type: ignore[arg-type]
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, means, inverse = ctx.saved_tensors  # type: ignore[attr-defined]
        (M, size), sums = x.shape, triton.cdiv(x.shape[0], ROWS_PER_SUM)
        grad_x, grad_weight = torch.empty_like(x), inverse.new_empty(sums, size)
        grad_bias = None if bias is None else torch.empty_like(grad_weight)
        if M:
            _norm_grad_kernel[(sums,)](
                whole(grad.reshape(M, size)), x, weight, means, inverse,
                grad_x, grad_weight, grad_bias, M, ROWS_PER_SUM=ROWS_PER_SUM,
                **ctx.how,  # type: ignore[attr-defined]
            )  # fmt: skip
        of_bias = None if grad_bias is None else grad_bias.sum(0).to(bias.dtype)
        return grad_x.view(grad.shape), grad_weight.sum(0).to(weight.dtype), of_bias, None, None
