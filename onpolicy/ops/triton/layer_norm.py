"""Layer norm: every row is summed by itself, as in the RMS norm (norm.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.triton.device import UNFUSED, whole
from onpolicy.ops.triton.norm import ROWS_PER_SUM, block_of


@triton.jit(do_not_specialize=["M"])
def _layer_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    means: tl.tensor,
    inverse: tl.tensor,
    M: tl.tensor,
    eps: tl.float32,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    offsets = rows[:, None] * SIZE + columns[None, :]
    is_column = columns < SIZE
    is_element = (rows < M)[:, None] & is_column[None, :]
    values = tl.load(x + offsets, mask=is_element, other=0.0).to(tl.float32)
    mean = tl.sum(values, 1) / SIZE
    values = tl.where(is_element, values - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    biases = tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    result = weights[None, :] * (values * scale[:, None]) + biases[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=is_element)
    tl.store(means + rows, mean, mask=rows < M)
    tl.store(inverse + rows, scale, mask=rows < M)


@triton.jit(do_not_specialize=["M"])
def _layer_norm_grad_kernel(
    grad: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    means: tl.tensor,
    inverse: tl.tensor,
    grad_x: tl.tensor,
    grad_weight: tl.tensor,
    grad_bias: tl.tensor,
    M: tl.tensor,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS_PER_SUM: tl.constexpr,
) -> None:
    """Gradients of ROWS_PER_SUM rows; their sums for the parameters are one row of the partials."""
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
        mean = tl.load(means + rows, mask=rows < M, other=0.0)[:, None]
        scale = tl.load(inverse + rows, mask=rows < M, other=0.0)[:, None]
        normal = tl.where(is_element, (values - mean) * scale, 0.0)
        weight_total += tl.sum(grads * normal, 0)
        bias_total += tl.sum(grads, 0)
        grads *= weights[None, :]
        along = tl.sum(grads * normal, 1)[:, None] / SIZE
        average = tl.sum(grads, 1)[:, None] / SIZE
        result = scale * (grads - average - normal * along)
        tl.store(grad_x + offsets, result.to(grad_x.dtype.element_ty), mask=is_element)
    tl.store(grad_weight + tl.program_id(0) * SIZE + columns, weight_total, mask=is_column)
    tl.store(grad_bias + tl.program_id(0) * SIZE + columns, bias_total, mask=is_column)


class TritonLayerNorm(torch.autograd.Function):
    """Gradients of the parameters are added up in blocks of rows, then block after block."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """[..., D], [D], [D] -> [..., D] in the dtype of `x`; see `Operators.layer_norm`."""
        flat, weight, bias = whole(x.reshape(-1, x.shape[-1])), whole(weight), whole(bias)
        (M, size), out = flat.shape, torch.empty_like(flat)
        means, inverse = (flat.new_empty(M, dtype=torch.float32) for _ in range(2))
        rows, block, warps = block_of(size)
        if M:
            _layer_norm_kernel[(triton.cdiv(M, rows),)](
                flat,
                weight,
                bias,
                out,
                means,
                inverse,
                M,
                eps,
                SIZE=size,
                ROWS=rows,
                BLOCK=block,
                num_warps=warps,
                **UNFUSED,
            )
        ctx.save_for_backward(flat, weight, bias, means, inverse)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, bias, means, inverse = ctx.saved_tensors  # type: ignore[attr-defined]
        (M, size), sums = x.shape, triton.cdiv(x.shape[0], ROWS_PER_SUM)
        grad_x, partials = torch.empty_like(x), [inverse.new_empty(sums, size) for _ in range(2)]
        rows, block, warps = block_of(size)
        if M:
            _layer_norm_grad_kernel[(sums,)](
                whole(grad.reshape(M, size)),
                x,
                weight,
                means,
                inverse,
                grad_x,
                *partials,
                M,
                SIZE=size,
                ROWS=rows,
                BLOCK=block,
                ROWS_PER_SUM=ROWS_PER_SUM,
                num_warps=warps,
                **UNFUSED,
            )
        of_weight, of_bias = (partial.sum(0) for partial in partials)
        return grad_x.view(grad.shape), of_weight.to(weight.dtype), of_bias.to(bias.dtype), None
