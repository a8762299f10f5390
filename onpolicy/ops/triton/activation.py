"""`silu(gate) * up` in one pass over memory.

Row invariance: no element meets another. SiLU is rounded to its dtype before the product, and its
exponential is CUDA's own, so the result has the bits of PyTorch's two kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.triton.device import UNFUSED

BLOCK = 1024


def is_silu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether it is PyTorch's SiLU or transformers' (by name: to import that takes seconds)."""
    name = type(activation).__name__
    return activation is F.silu or type(activation) is nn.SiLU or name == "SiLUActivation"


@triton.jit
def _denominator(x: tl.tensor) -> tl.tensor:
    """`1 + exp(-x)` in float32, the exponential with the argument reduction of CUDA's `expf`.

    Triton's own multiplies by log2(e) in float32, an error that grows with |x|.
    """
    power = tl.floor(tl.clamp(tl.fma(-x, 0.0057249850623309612, 0.5), 0.0, 1.0) * 252.0) - 126.0
    rest = tl.fma(-x, 1.925963033500011079e-08, tl.fma(-x, 1.4426950216293334961, -power))
    scale = ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return 1.0 + tl.exp2(rest) * scale


@triton.jit
def _gated_kernel(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    stride_gate: tl.tensor,
    stride_up: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    x = tl.load(gate + row * stride_gate + columns, mask=is_column, other=0.0).to(tl.float32)
    y = tl.load(up + row * stride_up + columns, mask=is_column, other=0.0).to(tl.float32)
    rounded = tl.div_rn(x, _denominator(x)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + columns, (rounded * y).to(out.dtype.element_ty), mask=is_column)


@triton.jit
def _gated_grad_kernel(
    grad: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    grad_gate: tl.tensor,
    grad_up: tl.tensor,
    stride_gate: tl.tensor,
    stride_up: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    x = tl.load(gate + row * stride_gate + columns, mask=is_column, other=0.0).to(tl.float32)
    y = tl.load(up + row * stride_up + columns, mask=is_column, other=0.0).to(tl.float32)
    g = tl.load(grad + row * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    sigmoid = 1.0 / _denominator(x)
    slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    dtype = grad_gate.dtype.element_ty
    tl.store(grad_gate + row * SIZE + columns, (g * y * slope).to(dtype), mask=is_column)
    tl.store(grad_up + row * SIZE + columns, (g * x * sigmoid).to(dtype), mask=is_column)


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(kernel: triton.JITFunction, tensors: list[Tensor], gate: Tensor, up: Tensor) -> None:
    rows, size = gate.shape
    if rows:
        kernel[rows, triton.cdiv(size, BLOCK)](
            *tensors, gate.stride(0), up.stride(0), SIZE=size, BLOCK=BLOCK, num_warps=4, **UNFUSED
        )


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, [..., I] each, of one dtype; no autograd. Rows may lie apart in memory."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows = _rows(gate), _rows(up)
    _launch(_gated_kernel, [*rows, out], *rows)
    return out


class TritonSiluAndMul(torch.autograd.Function):
    """`silu_and_mul` with gradients in float32, rounded once."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu_and_mul(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = map(_rows, ctx.saved_tensors)  # type: ignore[attr-defined]
        grad_gate, grad_up = torch.empty((2, *grad.shape), dtype=gate.dtype, device=gate.device)
        _launch(_gated_grad_kernel, [grad.contiguous(), gate, up, grad_gate, grad_up], gate, up)
        return grad_gate, grad_up
