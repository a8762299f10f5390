"""RMS norm in one kernel with the residual sum before it, or the rotary embedding after it.

Row invariance: as in `norm` and `elementwise`, whose tiles, sums and roundings these kernels
repeat. The order in which Triton adds up a row follows from the tile, its warps and the layout of
its loads, which are the same. The engine tests at start-up that they give the same bits
(models/fused_layers.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.ops.triton.device import UNFUSED, whole
from onpolicy.ops.triton.norm import options


@triton.jit(do_not_specialize=["M"])
def _add_rms_norm_kernel(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, total: tl.tensor, out: tl.tensor,
    M: tl.tensor, eps: tl.float32,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ROUND_LAST: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    offsets = rows[:, None] * SIZE + columns[None, :]
    is_element = (rows < M)[:, None] & (columns < SIZE)[None, :]
    values = tl.load(x + offsets, mask=is_element, other=0.0).to(tl.float32)
    values += tl.load(residual + offsets, mask=is_element, other=0.0).to(tl.float32)
    rounded = values.to(total.dtype.element_ty)
    tl.store(total + offsets, rounded, mask=is_element)
    values = rounded.to(tl.float32)
    normal = values * tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)[:, None]
    if not ROUND_LAST:
        normal = normal.to(x.dtype.element_ty).to(tl.float32)
    weights = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    tl.store(out + offsets, (weights[None, :] * normal).to(out.dtype.element_ty), mask=is_element)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, round_last: bool = False
) -> tuple[Tensor, Tensor]:
    """Return `residual + x` and its `rms_norm`, [..., D] each; no autograd."""
    size = x.shape[-1]
    rows, others = (whole(tensor.reshape(-1, size)) for tensor in (x, residual))
    dtype = x.dtype if round_last else torch.promote_types(x.dtype, weight.dtype)
    total, out = torch.empty_like(rows), torch.empty_like(rows, dtype=dtype)
    how = {"ROUND_LAST": round_last, **options(size), **UNFUSED}
    if rows.numel():
        _add_rms_norm_kernel[(triton.cdiv(len(rows), how["ROWS"]),)](
            rows, others, whole(weight), total, out, len(rows), eps, **how
        )
    return total.view(x.shape), out.view(x.shape)


@triton.jit
def _norm_rotary_rows(
    x: tl.tensor, weight: tl.tensor, cos: tl.tensor, sin: tl.tensor, out: tl.tensor,
    row: tl.tensor, M: tl.tensor, heads: tl.tensor, stride_xt: tl.tensor, stride_xh: tl.tensor,
    eps: tl.float32,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ROUND_LAST: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ROWS heads of [T, heads, SIZE], from index `row` on; `out` is contiguous."""
    rows = row.to(tl.int64) + tl.arange(0, ROWS)
    token, columns = rows // heads, tl.arange(0, BLOCK)
    is_column = columns < SIZE
    is_element = (rows < M)[:, None] & is_column[None, :]
    x += (token * stride_xt + (rows % heads) * stride_xh)[:, None]
    dtype = x.dtype.element_ty
    values = tl.load(x + columns[None, :], mask=is_element, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)[:, None]
    # The other half of the head, as `rotate_half` puts it beside an element; its sign comes later.
    across = tl.where(columns < SIZE // 2, columns + SIZE // 2, columns - SIZE // 2)
    others = tl.load(x + across[None, :], mask=is_element, other=0.0).to(tl.float32)
    normal, other = values * scale, others * scale
    if not ROUND_LAST:
        normal, other = normal.to(dtype).to(tl.float32), other.to(dtype).to(tl.float32)
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    weights_across = tl.load(weight + across, mask=is_column, other=0.0).to(tl.float32)[None, :]
    normal = (weights * normal).to(dtype).to(tl.float32)
    other = (weights_across * other).to(dtype).to(tl.float32)
    other = tl.where((columns < SIZE // 2)[None, :], -other, other)
    angle = token[:, None] * SIZE + columns[None, :]
    cosines = tl.load(cos + angle, mask=is_element, other=0.0).to(tl.float32)
    sines = tl.load(sin + angle, mask=is_element, other=0.0).to(tl.float32)
    turned = (normal * cosines).to(dtype).to(tl.float32)
    turned += (other * sines).to(dtype).to(tl.float32)
    tl.store(out + rows[:, None] * SIZE + columns[None, :], turned.to(dtype), mask=is_element)


@triton.jit(do_not_specialize=["T"])
def _norm_rotary_kernel(
    q: tl.tensor, k: tl.tensor, q_weight: tl.tensor, k_weight: tl.tensor,
    cos: tl.tensor, sin: tl.tensor, q_out: tl.tensor, k_out: tl.tensor, T: tl.tensor,
    stride_qt: tl.tensor, stride_qh: tl.tensor, stride_kt: tl.tensor, stride_kh: tl.tensor,
    eps: tl.float32, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ROUND_LAST: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the blocks of rows of all queries, and after them of all keys."""
    block = tl.program_id(0)
    of_queries = tl.cdiv(T * HEADS, ROWS)
    if block < of_queries:
        _norm_rotary_rows(
            q, q_weight, cos, sin, q_out, block * ROWS, T * HEADS, HEADS, stride_qt, stride_qh, eps,
            SIZE, ROWS, BLOCK, ROUND_LAST,
        )  # fmt: skip
    else:
        _norm_rotary_rows(
            k, k_weight, cos, sin, k_out, (block - of_queries) * ROWS, T * KV_HEADS, KV_HEADS,
            stride_kt, stride_kh, eps, SIZE, ROWS, BLOCK, ROUND_LAST,
        )  # fmt: skip


def norm_rotary(
    q: Tensor,
    k: Tensor,
    weights: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    round_last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Apply `rotary` to `rms_norm`s over the last axis, for a batch of one; no autograd.

    q: [1, H, T, D]; k: [1, H_kv, T, D]; weights: [D] each; cos, sin: [1, T, D], of the dtype of q.
    """
    (_, heads, tokens, size), kv_heads = q.shape, k.shape[1]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    rotated = [x.new_empty(1, tokens, x.shape[1], size).transpose(1, 2) for x in (q, k)]
    how = {"ROUND_LAST": round_last, **options(size), **UNFUSED}
    if tokens:
        blocks = sum(triton.cdiv(tokens * count, how["ROWS"]) for count in (heads, kv_heads))
        _norm_rotary_kernel[(blocks,)](
            q, k, *map(whole, weights), cos.contiguous(), sin.contiguous(), *rotated, tokens,
            q.stride(2), q.stride(1), k.stride(2), k.stride(1), eps,
            HEADS=heads, KV_HEADS=kv_heads, **how,
        )  # fmt: skip
    return rotated[0], rotated[1]
