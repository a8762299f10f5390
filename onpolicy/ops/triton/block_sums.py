"""A kernel that adds products of blocks of K along a binary tree (`onpolicy/ops/row_parallel.py`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.ops.triton.device import UNFUSED

SIZE = 1024
"""Number of result elements per thread block."""


@triton.jit
def tree_of_blocks(
    terms: tl.tensor, offsets: tl.tensor, mask: tl.tensor, stride: tl.tensor, BLOCKS: tl.constexpr
) -> tl.tensor:
    """Sum BLOCKS terms that lie `stride` elements apart, along a binary tree."""
    if BLOCKS == 1:
        total = tl.load(terms + offsets, mask=mask, other=0.0)
    else:
        HALF: tl.constexpr = BLOCKS // 2
        left = tree_of_blocks(terms, offsets, mask, stride, HALF)
        total = left + tree_of_blocks(terms, offsets + HALF * stride, mask, stride, HALF)
    return total


@triton.jit(do_not_specialize=["size"])
def _add_blocks_kernel(
    terms: tl.tensor, bias: tl.tensor, out: tl.tensor, size: tl.tensor, N: tl.tensor,
    BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = offsets < size
    total = tree_of_blocks(terms, offsets, mask, size, BLOCKS)
    if HAS_BIAS:
        total += tl.load(bias + offsets % N, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


def add_blocks(terms: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Add terms along a binary tree, and a bias, in float32, rounded once; no autograd.

    terms: contiguous float32 [B, M, N], B a power of two; bias: [N] -> [M, N].
    """
    blocks, *shape = terms.shape
    out = terms.new_empty(shape, dtype=out_dtype)
    if out.numel():
        _add_blocks_kernel[(triton.cdiv(out.numel(), SIZE),)](
            terms, bias, out, out.numel(), shape[-1],
            BLOCKS=blocks, HAS_BIAS=bias is not None, SIZE=SIZE, num_warps=4, **UNFUSED,
        )  # fmt: skip
    return out
