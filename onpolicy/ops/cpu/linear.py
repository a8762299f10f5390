"""Linear on a CPU: float32 GEMMs of a small, fixed set of shapes, each on one thread.

Two things break row invariance in `F.linear` on a CPU: (a) fewer than 16 rows, which take
matrix-vector and narrow kernels, and (b) a number of threads, which splits large products in ways
that depend on the number of rows. So rows are padded to a multiple of 16 (to fewer where a test
succeeded, `gemms.py`) and cut into tiles of 256 to 1,024, and every tile is one single-threaded
GEMM.

Tensor parallelism also shards the columns of an output, and a GEMM's sums over K may depend on the
number of its columns. So columns are cut into tiles too, and the last one is padded with zero
columns: in bfloat16 to a whole tile of 256; in float32, where tiles have 512, to a multiple of 16,
since MKL's strict mode (`compat/process.py`) sums alike in all such widths. (Without it MKL cuts a
long K elsewhere below 192 columns. Ranks that share columns check theirs:
`ops/checks/self_check.py`.)

bfloat16 operands are widened first: their products are exact in float32, the sum is rounded once at
the end, and CPUs without bfloat16 instructions are several times faster this way. On a CPU that has
them, oneDNN multiplies bfloat16 twice as fast as float32. It sums in float32 and rounds once too,
in an order of its own: the same tiles, other bits, so the contract says which
(`ops/backends/entries.py`). With AMX instructions that order depends on the number of rows, so there
all products have 64.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.base import Piece
from onpolicy.ops.cpu.gemms import BFLOAT16_COLUMNS, COLUMN_MULTIPLE, COLUMNS, Gemms, Product
from onpolicy.ops.cpu.layout import first_rows, pad_rows, whole

MIN_ROWS = 256
"""Minimum number of rows of a piece, if there are as many."""

PIECES_PER_THREAD = 2
"""Minimum number of pieces of a product, if it has as many tiles of MIN_ROWS. Fewer pieces have
more rows and are faster, so a single thread takes one piece with all rows."""


def tiled_linear(
    gemms: Gemms,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None = None,
    blocks: int = 1,
) -> Tensor:
    """Compute row-invariant `x @ weight.T + bias`: [M, K], [N, K], [N] -> [M, N]; no autograd.

    `blocks` of K, a power of two, are GEMMs of their own, added along a binary tree.
    """
    out, pieces = _product(gemms, x, weight, bias, out_dtype, blocks)
    gemms.pool.run(pieces, gemms.flops(len(out), weight))
    return first_rows(out, x.shape[0])


def _product(
    gemms: Gemms,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None = None,
    blocks: int = 1,
) -> tuple[Tensor, list[Piece]]:
    """Return the padded result of `tiled_linear`, and the pieces of work that fill it."""
    rows = _whole_rows(gemms, x, weight, bias is not None, out_dtype or x.dtype, blocks)
    out = x.new_empty(len(rows), weight.shape[0], dtype=out_dtype)
    return out, _pieces(gemms, rows, weight, bias, out, blocks)


def tiled_grouped_linear(
    gemms: Gemms, x: Tensor, weight: Tensor, offsets: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Apply `tiled_linear` to every expert's rows: [S, K], [E, N, K], int64 [E + 1] -> [S, N]."""
    bounds = offsets.tolist()
    groups = [(e, a, b) for e, (a, b) in enumerate(itertools.pairwise(bounds)) if b > a]
    none = x.new_empty(0, weight.shape[1], dtype=out_dtype)
    inputs = [_whole_rows(gemms, x[a:b], weight[e], False, none.dtype) for e, a, b in groups]
    outs = [none.new_empty(len(rows), weight.shape[1]) for rows in inputs]
    pieces = [
        piece
        for (expert, _, _), rows, out in zip(groups, inputs, outs, strict=True)
        for piece in _pieces(gemms, rows, weight[expert], None, out)
    ]
    gemms.pool.run(pieces, sum(gemms.flops(len(out), weight[0]) for out in outs))
    return torch.cat([none, *(out[: b - a] for (_, a, b), out in zip(groups, outs, strict=True))])


def _pieces(
    gemms: Gemms, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, blocks: int = 1
) -> list[Piece]:
    """Return pieces of `out = x @ weight.T + bias`, each a tile of columns and some of the rows."""
    width = BFLOAT16_COLUMNS if x.dtype == torch.bfloat16 else gemms.columns
    columns = [slice(c, c + width) for c in range(0, weight.shape[0], width)]
    # Split rows only as far as threads need pieces: larger pieces are faster.
    threads = gemms.pool.num_threads
    count = max(1, PIECES_PER_THREAD * threads // len(columns)) if threads > 1 else 1
    multiple, _ = gemms.row_limits(x.dtype)
    step = max(MIN_ROWS, math.ceil(len(x) / count / multiple) * multiple)
    return [
        partial(_fill, gemms, x, weight, bias, out, tile, slice(r, r + step), blocks)
        for tile in columns
        for r in range(0, len(x), step)
    ]


def _whole_rows(
    gemms: Gemms, x: Tensor, weight: Tensor, has_bias: bool, out_dtype: torch.dtype, blocks: int = 1
) -> Tensor:
    operand = gemms.operand(x, out_dtype)
    multiple = gemms.row_multiple(len(x), weight, has_bias, operand, blocks)
    if x.dtype == operand and len(x) % multiple == 0:
        return whole(x)
    return whole(pad_rows(x, multiple).to(operand))


def _fill(
    gemms: Gemms,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    columns: slice,
    rows: slice,
    blocks: int,
) -> None:
    """Compute `columns` of some `rows` of `out`, one GEMM for each tile of them.

    Slices and conversions that change nothing are skipped: after a product, which fills the core's
    caches, a call of PyTorch takes 10 to 20 us, and a small product 800.
    """
    width = columns.stop - columns.start
    alone = len(weight) <= width
    tile = weight if alone else weight[columns]
    if tile.dtype != x.dtype:
        tile = tile.to(x.dtype)
    results = out if alone else out[:, columns]
    count = len(tile)
    if count < width:
        multiple = width if x.dtype == torch.bfloat16 else COLUMN_MULTIPLE
        tile = pad_rows(tile, multiple).contiguous()
    tile_bias = None if bias is None else F.pad(bias[columns].to(x.dtype), (0, len(tile) - count))
    in_place = blocks == 1 and count == len(tile) and out.dtype == x.dtype
    _, most = gemms.row_limits(x.dtype)
    stop = min(rows.stop, len(x))
    for start in range(rows.start, stop, most):
        end = min(start + most, stop)
        is_all = end - start == len(x)
        part, result = (x, results) if is_all else (x[start:end], results[start:end])
        if in_place:
            gemms.multiply_into(result, part, tile, tile_bias)
        else:
            result.copy_(_tree(gemms.product, part, tile, tile_bias, blocks)[:, :count])


def _tree(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: int) -> Tensor:
    if blocks == 1:
        return product(x, weight, bias)
    (x_left, x_right), (left, right) = x.chunk(2, dim=-1), weight.chunk(2, dim=-1)
    half = blocks // 2
    return _tree(product, x_left, left, bias, half).add_(_tree(product, x_right, right, None, half))


def _flat(x: Tensor) -> Tensor:
    """View [..., K] as [M, K]."""
    return x if x.dim() == 2 else x.view(-1, x.shape[-1])


def _weight_grad_flops(grad: Tensor, x: Tensor) -> float:
    return 2.0 * grad.numel() * x.shape[1]


def _weight_grad_pieces(
    gemms: Gemms, grad: Tensor, x: Tensor, out: Tensor, *, adds: bool = False
) -> list[Piece]:
    """Return pieces of `out = grad.T @ x`, or of `out +=`, rounded to the dtype of `x` in both."""
    operand = gemms.operand(grad, x.dtype)
    grad, wide = grad.to(operand), x.to(operand)
    is_one = len(out) <= COLUMNS

    def piece(rows: slice) -> None:
        part, result = (grad.t(), out) if is_one else (grad[:, rows].t(), out[rows])
        if adds:
            result.add_(gemms.product(part, wide.t(), None).to(x.dtype))
        elif out.dtype == operand:
            gemms.multiply_into(result, part, wide.t(), None)
        else:
            result.copy_(gemms.product(part, wide.t(), None))

    starts = range(0, out.shape[0], COLUMNS)
    return [partial(piece, slice(start, start + COLUMNS)) for start in starts]


def linear_gradients(
    gemms: Gemms, x: Tensor, weight: Tensor, grad: Tensor, weight_sum: Tensor
) -> Tensor:
    """Return the gradient of `x`, as `AlignedLinear` does; add the weight's to `weight_sum`.

    x: [M, K]; weight: [N, K]; grad: [M, N]; weight_sum: float32 [N, K].
    """
    out, pieces = _product(gemms, grad, weight.t(), None, x.dtype)
    pieces += _weight_grad_pieces(gemms, grad, x, weight_sum, adds=True)
    gemms.pool.run(pieces, 2 * _weight_grad_flops(grad, x))
    return first_rows(out, x.shape[0])


class AlignedLinear(torch.autograd.Function):
    """A linear with row-invariant forward and input gradient; its weight gradient is deterministic.

    x: [..., K] -> [..., N]. It applies `whole` to its gradient itself.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gemms: Gemms,
        out_dtype: torch.dtype,
        blocks: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gemms = gemms  # type: ignore[attr-defined]
        out = tiled_linear(gemms, _flat(x), weight, bias, out_dtype, blocks)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        gemms: Gemms = ctx.gemms  # type: ignore[attr-defined]
        rows, grad = _flat(x), _flat(whole(grad))
        of_x = of_weight = None
        pieces: list[Piece] = []  # of both gradients, so that all threads have work
        if needs_weight:
            of_weight = x.new_empty(weight.shape)  # in the dtype of the weight
            pieces += _weight_grad_pieces(gemms, grad, rows, of_weight)
        if needs_x:
            of_x, of_rows = _product(gemms, grad, weight.t(), None, x.dtype)
            pieces += of_rows
        gemms.pool.run(pieces, (needs_x + needs_weight) * _weight_grad_flops(grad, rows))
        if of_x is not None:
            of_x = first_rows(of_x, len(rows))
            of_x = of_x if x.dim() == 2 else of_x.view(x.shape)
        of_bias = grad.sum(0) if needs_bias else None
        return of_x, of_weight, of_bias, None, None, None


def grouped_weight_grad(
    gemms: Gemms, grad: Tensor, x: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute every expert's `grad.T @ x` over its rows, or zeros: [S, N], [S, K] -> [E, N, K].

    One thread computes each row of a weight.
    """
    out = x.new_zeros(len(offsets) - 1, grad.shape[1], x.shape[1], dtype=dtype)
    for expert, (a, b) in enumerate(itertools.pairwise(offsets.tolist())):
        if b > a:
            pieces = _weight_grad_pieces(gemms, grad[a:b], x[a:b], out[expert])
            gemms.pool.run(pieces, _weight_grad_flops(grad[a:b], x))
    return out
