"""Log-probabilities, entropies and softmax: rows of logits, summed in one fixed order.

Row invariance: a row is cut into chunks of columns from 0. Each is summed by a thread block of its
own, so that one row fills the device, and another thread block merges the chunks of a row; both
along fixed trees, which depend only on the size of the vocabulary. All functions here take a row's
maximum and sum from these kernels and then treat every logit by itself, so the rollout's [M, V] and
the trainer's [M] agree to the last bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.triton.device import UNFUSED, next_power_of_2, whole

MAX_BLOCK = 4096
"""Number of columns of a chunk; it decides how a row's sum is grouped."""


@triton.jit
def _scaled(
    logits: tl.tensor, columns: tl.tensor, is_column: tl.tensor, temperature: tl.tensor
) -> tl.tensor:
    values = tl.load(logits + columns, mask=is_column, other=float("-inf")).to(tl.float32)
    return tl.div_rn(values, temperature)


@triton.jit
def _chunk_statistics_kernel(
    logits: tl.tensor, temperature: tl.tensor,
    largest: tl.tensor, totals: tl.tensor, moments: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the maximum of a row's chunk, the sum of exponentials below it, and their first moment.

    For a row of one chunk, compute the results of `_statistics_kernel`.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    scaled = _scaled(logits + row * SIZE, columns, columns < SIZE, tl.load(temperature + row))
    peak = tl.max(scaled, 0)
    below = scaled - tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp(below)
    total = tl.sum(weight, 0)
    moment = tl.sum(weight * tl.where(weight == 0.0, 0.0, below), 0)
    if CHUNKS == 1:
        moment = tl.log(total) - moment / total
        total = tl.log(total)
    tl.store(largest + row * CHUNKS + chunk, peak)
    tl.store(totals + row * CHUNKS + chunk, total)
    tl.store(moments + row * CHUNKS + chunk, moment)


@triton.jit
def _statistics_kernel(
    peaks: tl.tensor, totals: tl.tensor, moments: tl.tensor,
    largest: tl.tensor, log_total: tl.tensor, entropy: tl.tensor,
    CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a row's maximum, the log of the sum of exponentials below it, and the entropy."""
    row, chunks = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED_CHUNKS)
    places, is_chunk = row * CHUNKS + chunks, chunks < CHUNKS
    peak = tl.load(peaks + places, mask=is_chunk, other=float("-inf"))
    total = tl.load(totals + places, mask=is_chunk, other=0.0)
    moment = tl.load(moments + places, mask=is_chunk, other=0.0)
    top = tl.max(peak, 0)
    below = peak - top
    share = tl.exp(below)
    sum_of_all = tl.sum(total * share, 0)
    moment = moment * share + total * share * tl.where(share == 0.0, 0.0, below)
    log_sum = tl.log(sum_of_all)
    tl.store(largest + row, top)
    tl.store(log_total + row, log_sum)
    tl.store(entropy + row, log_sum - tl.sum(moment, 0) / sum_of_all)


@triton.jit
def _log_softmax_kernel(
    logits: tl.tensor, temperature: tl.tensor, largest: tl.tensor, log_total: tl.tensor,
    out: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, EXP: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    scaled = _scaled(logits + row * SIZE, columns, is_column, tl.load(temperature + row))
    result = scaled - tl.load(largest + row) - tl.load(log_total + row)
    if EXP:
        result = tl.exp(result)
    tl.store(out + row * SIZE + columns, result, mask=is_column)


@triton.jit(do_not_specialize=["M"])
def _gather_kernel(
    logits: tl.tensor, temperature: tl.tensor, targets: tl.tensor,
    largest: tl.tensor, log_total: tl.tensor, out: tl.tensor, M: tl.tensor,
    SIZE: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows < M
    columns = rows * SIZE + tl.load(targets + rows, mask=is_row, other=0)
    t = tl.load(temperature + rows, mask=is_row, other=1.0)
    scaled = _scaled(logits, columns, is_row, t)
    top = tl.load(largest + rows, mask=is_row, other=0.0)
    log_sum = tl.load(log_total + rows, mask=is_row, other=0.0)
    tl.store(out + rows, scaled - top - log_sum, mask=is_row)


@triton.jit
def _grad_logits_kernel(
    logits: tl.tensor, temperature: tl.tensor, targets: tl.tensor,
    largest: tl.tensor, log_total: tl.tensor, entropy: tl.tensor,
    grad: tl.tensor, grad_entropy: tl.tensor, out: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, OF_ENTROPY: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    t = tl.load(temperature + row)
    scaled = _scaled(logits + row * SIZE, columns, is_column, t)
    log_prob = scaled - tl.load(largest + row) - tl.load(log_total + row)
    weight = tl.exp(log_prob)
    is_target = (columns == tl.load(targets + row)).to(tl.float32)
    result = tl.load(grad + row) / t * (is_target - weight)
    if OF_ENTROPY:
        slope = tl.where(weight == 0.0, 0.0, weight * (log_prob + tl.load(entropy + row)))
        result -= tl.load(grad_entropy + row) / t * slope
    tl.store(out + row * SIZE + columns, result.to(out.dtype.element_ty), mask=is_column)


def _block(size: int) -> dict[str, int]:
    """Return the options of kernels with thread blocks along a row; they depend only on its size."""
    block = min(MAX_BLOCK, next_power_of_2(size))
    return {"SIZE": size, "BLOCK": block, "num_warps": max(1, block // 512)}


def _statistics(logits: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    """Return maximum, log of the sum of exponentials below it, and entropy: float32 [M] each."""
    rows, size = logits.shape
    options = _block(size)
    chunks = triton.cdiv(size, options["BLOCK"])
    of_chunks = tuple(temperature.new_empty(rows * chunks) for _ in range(3))
    if rows:
        _chunk_statistics_kernel[rows, chunks](
            logits, temperature, *of_chunks, CHUNKS=chunks, **options, **UNFUSED
        )
    if chunks == 1:
        return of_chunks
    statistics = tuple(temperature.new_empty(rows) for _ in range(3))
    if rows:
        _statistics_kernel[(rows,)](
            *of_chunks, *statistics,
            CHUNKS=chunks, PADDED_CHUNKS=next_power_of_2(chunks), num_warps=1, **UNFUSED,
        )  # fmt: skip
    return statistics


def _prepare(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kernels' inputs: contiguous [M, V], and float32 [M] for [M, 1]."""
    return whole(logits), temperature.expand(len(logits), 1).contiguous().view(-1)


def log_softmax(logits: Tensor, temperature: Tensor, exp: bool = False) -> Tensor:
    """Compute `Operators.log_softmax`; with `exp` the probabilities themselves. No autograd."""
    logits, temperature = _prepare(logits, temperature)
    rows, size = logits.shape
    out = logits.new_empty(rows, size, dtype=torch.float32)
    largest, log_total, _ = _statistics(logits, temperature)
    options = _block(size)
    if rows:
        _log_softmax_kernel[rows, triton.cdiv(size, options["BLOCK"])](
            logits, temperature, largest, log_total, out, EXP=exp, **options, **UNFUSED
        )
    return out


def gather_log_probs(logits: Tensor, temperature: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `Operators.gather_log_probs`, without writing a tensor of the size of the logits."""
    logits, temperature = _prepare(logits, temperature)
    rows, size = logits.shape
    out, block = temperature.new_empty(rows), 128
    largest, log_total, entropy = _statistics(logits, temperature)
    if rows:
        _gather_kernel[(triton.cdiv(rows, block),)](
            logits, temperature, targets.contiguous(), largest, log_total, out, rows,
            SIZE=size, ROWS=block, num_warps=4, **UNFUSED,
        )  # fmt: skip
    return out, entropy


def grad_logits(
    logits: Tensor,
    temperature: Tensor,
    targets: Tensor,
    grad: Tensor,
    grad_entropy: Tensor | None = None,
) -> Tensor:
    """Compute `Operators.grad_logits`."""
    logits, temperature = _prepare(logits, temperature)
    rows, size = logits.shape
    out, grad = torch.empty_like(logits), grad.contiguous()
    statistics = _statistics(logits, temperature)
    of_entropy = grad if grad_entropy is None else grad_entropy.contiguous()
    options = _block(size)
    if rows:
        _grad_logits_kernel[rows, triton.cdiv(size, options["BLOCK"])](
            logits, temperature, targets.contiguous(), *statistics, grad, of_entropy, out,
            OF_ENTROPY=grad_entropy is not None, **options, **UNFUSED,
        )  # fmt: skip
    return out


class TritonLogSoftmax(torch.autograd.Function):
    """`log_softmax` with a backward pass in PyTorch's operators."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, temperature: Tensor) -> Tensor:
        out = log_softmax(logits, temperature)
        ctx.save_for_backward(out, temperature)
        ctx.dtype = logits.dtype  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        out, temperature = ctx.saved_tensors  # type: ignore[attr-defined]
        grad = (grad - out.exp() * grad.sum(-1, keepdim=True)) / temperature
        return grad.to(ctx.dtype), None  # type: ignore[attr-defined]


class TritonSoftmax(torch.autograd.Function):
    """Softmax over the last axis, in float32, with a backward pass in PyTorch's operators."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ones = torch.ones(len(rows), 1, device=x.device)
        out = log_softmax(rows, ones, exp=True).view(x.shape)
        ctx.save_for_backward(out)
        ctx.dtype = x.dtype  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors  # type: ignore[attr-defined]
        grad = out * (grad - (out * grad).sum(-1, keepdim=True))
        return grad.to(ctx.dtype)  # type: ignore[attr-defined]
