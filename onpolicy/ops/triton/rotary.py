"""Rotary embedding in one pass over queries and keys.

Row invariance: no sum at all; every element is made of two elements of its own head. Each product
and sum is rounded to the dtype of the input, as transformers' chain of PyTorch operators does it, so
the bits are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.triton.device import UNFUSED, next_power_of_2


@triton.jit
def _rotary_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    T: tl.tensor,
    stride_xb: tl.tensor,
    stride_xh: tl.tensor,
    stride_xt: tl.tensor,
    stride_ob: tl.tensor,
    stride_oh: tl.tensor,
    stride_ot: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr,
) -> None:
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
    """`x * cos + rotate_half(x) * sin`, or its transpose: [B, H, T, D], [B, T, D]; no autograd.

    `cos` and `sin` are contiguous and of the dtype of `x`.
    """
    batch, heads, tokens, dim = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty_like(x)  # keeps the order of axes in memory
    half = dim // 2
    half_block = next_power_of_2(half)
    heads_block = min(next_power_of_2(heads), max(1, 2048 // half_block))
    if x.numel():
        _rotary_kernel[batch * tokens, triton.cdiv(heads, heads_block)](
            x,
            cos,
            sin,
            out,
            tokens,
            *x.stride()[:3],
            *out.stride()[:3],
            HEADS=heads,
            HALF=half,
            HEADS_BLOCK=heads_block,
            HALF_BLOCK=half_block,
            BACKWARD=backward,
            num_warps=4,
            **UNFUSED,
        )
    return out


class TritonRotary(torch.autograd.Function):
    """Queries and keys, rotated; no gradient for the angles."""

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
