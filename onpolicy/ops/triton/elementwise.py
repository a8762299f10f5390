"""`silu(gate) * up`, and the rotary embedding of queries and keys, in one pass over memory each.

Row invariance: there is no sum at all; an element meets at most the other half of its own head.
Every intermediate result that PyTorch's chain of kernels rounds is rounded here too, and SiLU's
exponential is CUDA's own, so the bits are the same as in PyTorch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.triton.device import UNFUSED, next_power_of_2

BLOCK = 1024


def is_silu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Return whether it is PyTorch's SiLU or transformers' (by name: importing that takes seconds)."""
    name = type(activation).__name__
    return activation is F.silu or type(activation) is nn.SiLU or name == "SiLUActivation"


@triton.jit
def _denominator(x: tl.tensor) -> tl.tensor:
    """Compute `1 + exp(-x)` in float32, with the argument reduction of CUDA's `expf`.

    Triton's own multiplies by log2(e) in float32, with an error that grows with |x|.
    """
    power = tl.floor(tl.clamp(tl.fma(-x, 0.0057249850623309612, 0.5), 0.0, 1.0) * 252.0) - 126.0
    rest = tl.fma(-x, 1.925963033500011079e-08, tl.fma(-x, 1.4426950216293334961, -power))
    scale = ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return 1.0 + tl.exp2(rest) * scale


@triton.jit
def _gated_kernel(
    gate: tl.tensor, up: tl.tensor, out: tl.tensor, stride_gate: tl.tensor, stride_up: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    x = tl.load(gate + row * stride_gate + columns, mask=is_column, other=0.0).to(tl.float32)
    y = tl.load(up + row * stride_up + columns, mask=is_column, other=0.0).to(tl.float32)
    rounded = tl.div_rn(x, _denominator(x)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + columns, (rounded * y).to(out.dtype.element_ty), mask=is_column)


@triton.jit
def _gated_grad_kernel(
    grad: tl.tensor, gate: tl.tensor, up: tl.tensor, grad_gate: tl.tensor, grad_up: tl.tensor,
    stride_gate: tl.tensor, stride_up: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
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


class TritonSiluAndMul(torch.autograd.Function):
    """`silu(gate) * up`, [..., I] each, of one dtype, with gradients in float32, rounded once.

    Rows may be strided.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        rows = _rows(gate), _rows(up)
        _launch(_gated_kernel, [*rows, out], *rows)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = map(_rows, ctx.saved_tensors)  # type: ignore[attr-defined]
        grad_gate, grad_up = torch.empty((2, *grad.shape), dtype=gate.dtype, device=gate.device)
        _launch(_gated_grad_kernel, [grad.contiguous(), gate, up, grad_gate, grad_up], gate, up)
        return grad_gate, grad_up


@triton.jit
def _rotary_kernel(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, out: tl.tensor, T: tl.tensor,
    stride_xb: tl.tensor, stride_xh: tl.tensor, stride_xt: tl.tensor,
    stride_ob: tl.tensor, stride_oh: tl.tensor, stride_ot: tl.tensor,
    HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    dims = tl.arange(0, HALF_BLOCK)
    mask = (heads < HEADS)[:, None] & (dims < HALF)[None, :]
    dtype = x.dtype.element_ty
    x += (token // T) * stride_xb + (token % T) * stride_xt
    x += heads[:, None] * stride_xh + dims[None, :]
    left = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
    angle = token * 2 * HALF + dims
    cos_left = tl.load(cos + angle, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    cos_right = tl.load(cos + angle + HALF, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    sin_left = tl.load(sin + angle, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    sin_right = tl.load(sin + angle + HALF, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:  # the transposed matrix: the other half's sine, with the other sign
        sin_left, sin_right = -sin_right, -sin_left
    out += (token // T) * stride_ob + (token % T) * stride_ot
    out += heads[:, None] * stride_oh + dims[None, :]
    rotated = (left * cos_left).to(dtype).to(tl.float32) + (-right * sin_left).to(dtype).to(
        tl.float32
    )
    tl.store(out, rotated.to(dtype), mask=mask)
    rotated = (right * cos_right).to(dtype).to(tl.float32) + (left * sin_right).to(dtype).to(
        tl.float32
    )
    tl.store(out + HALF, rotated.to(dtype), mask=mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> Tensor:
    """Compute `x * cos + rotate_half(x) * sin`, or its transpose; no autograd.

    x: [B, H, T, D]; `cos` and `sin`: [B, T, D], contiguous and of the dtype of `x`.
    """
    batch, heads, tokens, dim = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty_like(x)  # keeps the order of axes in memory
    half = dim // 2
    half_block = next_power_of_2(half)
    heads_block = min(next_power_of_2(heads), max(1, 2048 // half_block))
    if x.numel():
        _rotary_kernel[batch * tokens, triton.cdiv(heads, heads_block)](
            x, cos, sin, out, tokens, *x.stride()[:3], *out.stride()[:3],
            HEADS=heads, HALF=half, HEADS_BLOCK=heads_block, HALF_BLOCK=half_block,
            BACKWARD=backward, num_warps=4, **UNFUSED,
        )  # fmt: skip
    return out


class TritonRotary(torch.autograd.Function):
    """The rotary embedding of queries and keys; no gradient for the angles."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        cos, sin = (table.expand(q.shape[0], -1, -1).contiguous() for table in (cos, sin))
        ctx.save_for_backward(cos, sin)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad_q: Tensor, grad_k: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors  # type: ignore[attr-defined]
        return rotate(grad_q, cos, sin, True), rotate(grad_k, cos, sin, True), None, None
