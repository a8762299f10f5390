"""Sampling by inverting the cumulative distribution, and the uniform numbers for it.

A row is cut into chunks of columns from 0. Each chunk is summed in float64 by a program of its own,
so that one row fills the device; then one program per row finds the chunk in which the cumulative
probability exceeds the threshold, and the token in it. Row invariance: chunks and the order of
their sums depend only on the size of the vocabulary, so a token depends only on its own
log-probabilities and its own uniform number. (`torch.cumsum` scans differently for other numbers of
rows.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.ops.triton.device import UNFUSED, next_power_of_2, whole
from onpolicy.ops.uniform_numbers import FIRST, GAMMA, SECOND

MAX_CHUNK = 1024


@triton.jit
def _probabilities(log_probs: tl.tensor, columns: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    values = tl.load(log_probs + columns, mask=columns < SIZE, other=float("-inf"))
    return tl.exp(values.to(tl.float64))


@triton.jit
def _sums_kernel(
    log_probs: tl.tensor, sums: tl.tensor,
    SIZE: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    total = tl.sum(_probabilities(log_probs + row * SIZE, columns, SIZE), 0)
    tl.store(sums + row * CHUNKS + chunk, total)


@triton.jit
def _draw_kernel(
    log_probs: tl.tensor, sums: tl.tensor, uniform: tl.tensor, tokens: tl.tensor,
    SIZE: tl.constexpr, CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, PADDED_CHUNKS)
    ends = tl.cumsum(tl.load(sums + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=0.0), 0)
    threshold = tl.load(uniform + row) * tl.max(ends, 0)
    is_below = (ends <= threshold) & (chunks < CHUNKS - 1)
    before = tl.max(tl.where(is_below, ends, 0.0), 0)
    first = tl.sum(is_below.to(tl.int64), 0) * CHUNK
    columns = first + tl.arange(0, CHUNK)
    cumulative = before + tl.cumsum(_probabilities(log_probs + row * SIZE, columns, SIZE), 0)
    count = tl.sum(((cumulative <= threshold) & (columns < SIZE)).to(tl.int64), 0)
    tl.store(tokens + row, tl.minimum(first + tl.minimum(count, CHUNK - 1), SIZE - 1))


@triton.jit
def _shift_right(x: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _splitmix64(
    x: tl.tensor, GAMMA: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr
) -> tl.tensor:
    x = x + GAMMA
    x = (x ^ _shift_right(x, 30)) * FIRST
    x = (x ^ _shift_right(x, 27)) * SECOND
    return x ^ _shift_right(x, 31)


@triton.jit
def _uniform_kernel(
    seeds: tl.tensor, positions: tl.tensor, numbers: tl.tensor, count: int,
    GAMMA: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = _splitmix64(tl.load(seeds + rows, mask=rows < count, other=0), GAMMA, FIRST, SECOND)
    state += tl.load(positions + rows, mask=rows < count, other=0)
    state = _splitmix64(state, GAMMA, FIRST, SECOND)
    tl.store(numbers + rows, _shift_right(state, 11).to(tl.float64) / (1 << 53), mask=rows < count)


def sample(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Compute `Operators.sample`."""
    rows, size = log_probs.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=log_probs.device)
    if not rows:
        return tokens
    chunk = min(MAX_CHUNK, next_power_of_2(size))
    chunks = triton.cdiv(size, chunk)
    log_probs = whole(log_probs)
    sums = torch.empty(rows, chunks, dtype=torch.float64, device=log_probs.device)
    sizes = {"SIZE": size, "CHUNKS": chunks, "CHUNK": chunk, "num_warps": 4, **UNFUSED}
    _sums_kernel[(rows, chunks)](log_probs, sums, **sizes)
    padded = next_power_of_2(chunks)
    _draw_kernel[(rows,)](
        log_probs, sums, uniform.contiguous(), tokens, PADDED_CHUNKS=padded, **sizes
    )
    return tokens


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Compute `Operators.uniform`."""
    numbers = torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)
    count, block = seeds.numel(), 256
    if count:
        _uniform_kernel[(triton.cdiv(count, block),)](
            seeds.contiguous(), positions.to(torch.int64).contiguous(), numbers, count,
            GAMMA=GAMMA, FIRST=FIRST, SECOND=SECOND, BLOCK=block, **UNFUSED,
        )  # fmt: skip
    return numbers
