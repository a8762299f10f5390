"""Linear on a GPU: every output is one chain of float32 sums over K, in ascending order.

Row invariance: an output element is computed by one thread block, which walks K from 0 in blocks of
a fixed size and adds into a single float32 accumulator; K is never split and never reordered. The
height and width of a tile change with the number of rows, but only decide which outputs share a
thread block, not how one of them is summed, and all tiles of a GPU generation use the same tensor
core instruction.

Where K is cut into blocks (`onpolicy/ops/row_parallel.py`), each block is such a chain, and a
thread block adds up a subtree of them in registers. If it cannot hold the whole tree, or too few
thread blocks would be busy, several share the tree, and `block_sums.py` adds up their results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.ops.triton.block_sums import add_blocks
from onpolicy.ops.triton.device import UNFUSED, capability


@dataclass(frozen=True, slots=True)
class Tile:
    """The output rows x columns of a thread block, and K per step of its loop."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    """Number of loop steps whose operands are loaded at the same time."""

    blocks: int = 1
    """Number of blocks of K that a thread block adds up: as many as leave registers for their sums."""

    def options(self) -> dict[str, Any]:
        """Return the launch options of a kernel that computes such tiles."""
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns, "INNER": self.inner}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages, **UNFUSED}


HALF_INNER, FLOAT_INNER = 64, 16
"""K per step for 16-bit operands and for float32: the same in every tile."""

# Few rows (decoding) are bound by reading weights: narrow tiles, so that every multiprocessor gets
# some, with many loads in flight. Many rows are bound by arithmetic: tiles as large as fit.
_AMPERE = (
    Tile(16, 32, HALF_INNER, warps=4, stages=5, blocks=8),
    Tile(32, 32, HALF_INNER, warps=4, stages=5, blocks=8),
    Tile(64, 64, HALF_INNER, warps=4, stages=4, blocks=4),
    Tile(128, 128, HALF_INNER, warps=8, stages=3, blocks=2),
)
# Below 64 rows Hopper would fall back from wgmma to Ampere's instruction, whose internal rounding
# may differ.
_HOPPER = (
    Tile(64, 32, HALF_INNER, warps=4, stages=6, blocks=8),
    Tile(128, 128, HALF_INNER, warps=8, stages=4, blocks=2),
)
# float32 runs on the ordinary units, one fused multiply-add after the other.
_FLOAT = (
    Tile(16, 32, FLOAT_INNER, warps=4, stages=4, blocks=8),
    Tile(64, 64, FLOAT_INNER, warps=4, stages=3, blocks=2),
)


def tiles(dtype: torch.dtype, arch: int) -> tuple[Tile, ...]:
    """Return all tiles for operands of `dtype` on compute capability `arch`, low ones first."""
    if dtype == torch.float32:
        return _FLOAT
    return _AMPERE if arch < 90 else _HOPPER


GROUP = 8
"""Number of row tiles that share a column of weight tiles while it is in the L2 cache."""

ENOUGH_TILES = 80
"""Number of tiles that keep a GPU busy: on an H100, with 132 multiprocessors, higher tiles are
slower if there are fewer of them, and faster if there are more."""


def choose_tile(x: Tensor, rows: float, columns: int) -> Tile:
    """Choose the tile for an output of `rows` x `columns`; the choice changes no bits.

    It is the highest tile, no higher than `rows` needs, of which there are at least ENOUGH_TILES.
    """
    candidates = tiles(x.dtype, capability(x))
    highest = next(
        (i for i, tile in enumerate(candidates) if tile.rows >= rows), len(candidates) - 1
    )
    for tile in reversed(candidates[1 : highest + 1]):
        if math.ceil(rows / tile.rows) * math.ceil(columns / tile.columns) >= ENOUGH_TILES:
            return tile
    return candidates[0]


@triton.jit
def multiply_tile(
    x: tl.tensor, weight: tl.tensor,
    row_offsets: tl.tensor, is_row: tl.tensor, column_offsets: tl.tensor, is_column: tl.tensor,
    K: tl.tensor, stride_xk: tl.tensor, stride_wk: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Compute the one sum over K that all linears share: float32 [ROWS, COLUMNS]."""
    inner = tl.arange(0, INNER)
    x += row_offsets[:, None] + inner[None, :] * stride_xk
    weight += column_offsets[None, :] + inner[:, None] * stride_wk
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, K, INNER):
        is_inner = inner < K - start
        left = tl.load(x, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        right = tl.load(weight, mask=is_inner[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        x += INNER * stride_xk
        weight += INNER * stride_wk
    return total


@triton.jit
def multiply_blocks(
    x: tl.tensor, weight: tl.tensor,
    row_offsets: tl.tensor, is_row: tl.tensor, column_offsets: tl.tensor, is_column: tl.tensor,
    first: tl.tensor, K: tl.tensor, stride_xk: tl.tensor, stride_wk: tl.tensor,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sum BLOCKS blocks of K operands each, from `first` on, added along a binary tree."""
    if BLOCKS == 1:
        total = multiply_tile(
            x + first * stride_xk, weight + first * stride_wk,
            row_offsets, is_row, column_offsets, is_column,
            K, stride_xk, stride_wk, ROWS, COLUMNS, INNER,
        )  # fmt: skip
    else:
        HALF: tl.constexpr = BLOCKS // 2
        left = multiply_blocks(
            x, weight, row_offsets, is_row, column_offsets, is_column,
            first, K, stride_xk, stride_wk, HALF, ROWS, COLUMNS, INNER,
        )  # fmt: skip
        right = multiply_blocks(
            x, weight, row_offsets, is_row, column_offsets, is_column,
            first + HALF * K, K, stride_xk, stride_wk, HALF, ROWS, COLUMNS, INNER,
        )  # fmt: skip
        total = left + right
    return total


@triton.jit
def tile_of(
    program: tl.tensor, row_tiles: tl.tensor, column_tiles: tl.tensor, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return the row tile and column tile of the output that a thread block computes.

    Concurrent thread blocks cover GROUP row tiles, so their reads of both operands stay in L2.
    """
    per_group = GROUP * column_tiles
    first = (program // per_group) * GROUP
    height = min(row_tiles - first, GROUP)
    in_group = program % per_group
    return first + in_group % height, in_group // height


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor,
    M: tl.tensor, N: tl.tensor, K: tl.tensor,
    stride_xm: tl.tensor, stride_xk: tl.tensor, stride_wn: tl.tensor, stride_wk: tl.tensor,
    HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
) -> None:  # fmt: skip
    tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS), GROUP)
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < M, columns < N
    wide_rows, wide_columns = rows.to(tl.int64), columns.to(tl.int64)
    part = tl.program_id(1).to(tl.int64)  # part of the tree over blocks of K
    total = multiply_blocks(
        x, weight, wide_rows * stride_xm, is_row, wide_columns * stride_wn, is_column,
        part * BLOCKS * K, K, stride_xk, stride_wk, BLOCKS, ROWS, COLUMNS, INNER,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out += (part * M + wide_rows[:, None]) * N + columns[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def tiled_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    blocks: int = 1,
    tile: Tile | None = None,
) -> Tensor:
    """Compute `_product` of `onpolicy.ops.linears.Linears`: [M, K], [N, K], [N] -> [M, N].

    It has no autograd.
    """
    (M, K), N = x.shape, weight.shape[0]
    tile = tile or choose_tile(x, M, N)
    tiles = triton.cdiv(M, tile.rows) * triton.cdiv(N, tile.columns)
    parts = parts_of_tree(tile, tiles, blocks)
    if parts == 1:
        out = x.new_empty(M, N, dtype=out_dtype)
    else:
        out = x.new_empty(parts, M, N, dtype=torch.float32)
    if M:
        _linear_kernel[tiles, parts](
            x, weight, bias, out, M, N, K // blocks, *x.stride(), *weight.stride(),
            HAS_BIAS=bias is not None and parts == 1, GROUP=GROUP, BLOCKS=blocks // parts,
            **tile.options(),
        )  # fmt: skip
    return out if parts == 1 else add_blocks(out, bias, out_dtype)


def parts_of_tree(tile: Tile, tiles: int, blocks: int) -> int:
    """Return how many thread blocks share the tree of one tile of `tiles`; it changes no bits."""
    parts = max(1, blocks // tile.blocks)
    while parts < blocks and tiles * parts < ENOUGH_TILES:
        parts *= 2
    return parts


def product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Compute PyTorch's own `a @ b` of two matrices, left in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
