"""The two kernels of xxh3 on a GPU: sums of 1024-byte blocks, and the chain through them.

The chain is sequential, a handful of integer operations per kilobyte, and every tensor has its own:
the chains of all tensors run in parallel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS_PER_PROGRAM = 8
AHEAD = 16
"""Number of block sums that are loaded before the first of them is needed."""


@triton.jit(do_not_specialize=["num_blocks"])
def _block_sums_kernel(
    data: tl.tensor,
    secret: tl.tensor,
    sums: tl.tensor,
    num_blocks: tl.tensor,
    BLOCKS: tl.constexpr,
) -> None:
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    stripes, lanes = tl.arange(0, 16), tl.arange(0, 8)
    exists = blocks < num_blocks
    words = data + blocks[:, None, None] * 128 + stripes[None, :, None] * 8
    value = tl.load(words + lanes[None, None, :], mask=exists[:, None, None], other=0)
    neighbour = tl.load(words + (lanes ^ 1)[None, None, :], mask=exists[:, None, None], other=0)
    key = tl.load(secret + stripes[:, None] + lanes[None, :])[None, :, :]
    keyed = (value ^ key).to(tl.uint64, bitcast=True)
    product = (keyed & 0xFFFFFFFF) * (keyed >> 32)
    total = tl.sum(product.to(tl.int64, bitcast=True) + neighbour, 1)
    tl.store(sums + blocks[:, None] * 8 + lanes[None, :], total, mask=exists[:, None])


@triton.jit
def _chain_kernel(
    sums: tl.tensor,
    starts: tl.tensor,
    secrets: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    AHEAD: tl.constexpr,
) -> None:
    tensor, lanes = tl.program_id(0), tl.arange(0, 8)
    key = tl.load(secrets + tensor * 24 + 16 + lanes).to(tl.uint64, bitcast=True)
    prime = tl.full((8,), 0x9E3779B1, tl.uint64)
    state = tl.load(state + lanes).to(tl.uint64, bitcast=True)
    end = tl.load(starts + tensor + 1)
    for first in range(tl.load(starts + tensor), end, AHEAD):
        for i in tl.static_range(AHEAD):
            here = first + i + lanes * 0 < end  # the same for every lane
            total = tl.load(sums + (first + i) * 8 + lanes, mask=here, other=0)
            added = state + total.to(tl.uint64, bitcast=True)
            state = tl.where(here, (added ^ (added >> 47) ^ key) * prime, state)
    tl.store(out + tensor * 8 + lanes, state.to(tl.int64, bitcast=True))


def add_up_blocks(words: Tensor, secret: Tensor) -> Tensor:
    """Compute XXH3_accumulate of each block: int64 [blocks * 128], int64 [24] -> int64 [blocks, 8]."""
    num_blocks = len(words) // 128
    sums = words.new_empty(num_blocks, 8)
    with torch.cuda.device_of(words):
        _block_sums_kernel[(triton.cdiv(num_blocks, BLOCKS_PER_PROGRAM),)](
            words, secret, sums, num_blocks, BLOCKS=BLOCKS_PER_PROGRAM, enable_fp_fusion=False
        )
    return sums


def chain_blocks(sums: list[Tensor], secrets: Tensor, start: Tensor) -> Tensor:
    """Chain the blocks of each of N tensors. sums: int64 [blocks, 8] of each tensor; secrets: int64
    [N, 24]; start: int64 [8] -> int64 [N, 8]."""
    counts = torch.tensor([0, *map(len, sums)]).cumsum(0).to(start.device)
    out = start.new_empty(len(sums), 8)
    with torch.cuda.device_of(start):
        _chain_kernel[(len(sums),)](
            torch.cat(sums),
            counts,
            secrets,
            start,
            out,
            AHEAD=AHEAD,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return out
