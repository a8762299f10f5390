"""Linear by DeepGEMM's FP8 product, of an input and a weight that were rounded to FP8.

Both are given as their dequantised values in bfloat16. Rounding these again gives the same numbers
and scales, bit for bit, so the rounded weight alone is enough to multiply FP8 bytes: there is a
scale for each row of the input, and for each 128 x 128 of the weight.

Row invariance, from reading the source: the kernels walk K in ascending blocks of 128. The tensor
cores sum a block in four steps of 32, and that sum, times the product of both scales, is added to
one float32 accumulator; K is never split. The number of rows chooses the size of tiles and the
loads that they share, not the order of a sum. The dtype of the result chooses between two kernels:
one can write only bfloat16; the other can only add to float32, here to zeros, and needs scales for
each row of the weight. Sources: csrc/apis/gemm.hpp, csrc/apis/layout.hpp and
csrc/jit_kernels/heuristics/sm90.hpp of sgl-project/DeepGEMM; sm90_fp8_gemm_1d1d.cuh and
sm90_fp8_gemm_1d2d.cuh of sgl-deep-gemm 0.1.5.post1 and 0.2.5. None of this has run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onpolicy.ops.backends.base import FP8_BLOCK as BLOCK
from onpolicy.ops.hopper import gemm
from onpolicy.ops.linears import Linears
from onpolicy.weights.rounding import FP8, quantise

ROWS_AT_A_TIME = 32 * BLOCK
"""Number of rows of a weight held as float32 while bytes are made of it; it decides no bit."""

ALIGNED_SCALES = 4
"""float32 numbers in 16 bytes: TMA needs columns of scales to be multiples of this."""


class Bytes(NamedTuple):
    """A matrix as FP8 numbers and their scales."""

    numbers: Tensor
    """float8_e4m3fn [R, K], contiguous"""

    scales: Tensor
    """float32: for an input [R, K / 128], column-major; for a weight [R / 128, K / 128]"""


def input_in_bytes(x: Tensor) -> Bytes:
    """Quantise [M, K], each row by one scale, which is repeated for all its blocks of K."""
    numbers, scales = quantise(x, "fp8_e4m3")
    return Bytes(numbers.to(FP8), by_column(scales.expand(-1, x.shape[1] // BLOCK)))


def weight_in_bytes(weight: Tensor) -> Bytes:
    """Quantise [N, K] in blocks of 128 x 128; both sizes are multiples of 128."""
    parts = []
    for rows in weight.split(ROWS_AT_A_TIME):
        numbers, scales = quantise(rows, "fp8_e4m3_block128")
        parts.append((numbers.to(FP8), scales))
    return Bytes(*map(torch.cat, zip(*parts, strict=True)))


def by_column(scales: Tensor) -> Tensor:
    """Return [R, C] in column-major order, each column on a 16-byte boundary, as TMA needs it.

    DeepGEMM uses this layout as it is; it copies other layouts by kernels that depend on them.
    """
    rows, columns = scales.shape
    out = scales.new_zeros(columns, rows + -rows % ALIGNED_SCALES)
    out[:, :rows] = scales.t()
    return out.t()[:rows]


def multiply(x: Bytes, weight: Bytes, out: Tensor) -> None:
    """Write the product of the dequantised values: [M, K], [N, K] -> bfloat16 or float32 [M, N]."""
    product = gemm.loaded().fp8_gemm_nt
    # DeepGEMM accepts only plain tuples.
    if out.dtype == torch.bfloat16:
        product(tuple(x), tuple(weight), out, recipe=(1, BLOCK, BLOCK))
        return
    of_rows = weight.scales[:, None].expand(-1, BLOCK, -1).flatten(0, 1)
    added = weight.numbers, by_column(of_rows)
    product(tuple(x), added, out.zero_(), c=out, recipe=(1, 1, BLOCK))


class Fp8Linears(Linears):
    """Operators whose linears multiply FP8 bytes.

    Every input row was rounded by one scale, and the weight, whose sizes are multiples of 128, by
    one for each 128 x 128 block.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._held: dict[tuple[int, torch.Size], Bytes] = {}

    @torch.no_grad()
    def hold(self, weights: Iterable[Tensor]) -> None:
        for weight in weights:
            made, key = weight_in_bytes(weight), _place(weight)
            held = self._held.setdefault(key, made)
            # Copy in place, since CUDA graphs read these tensors.
            for into, new in zip(held, made, strict=True):
                into.copy_(new)

    def _product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, blocks: int
    ) -> Tensor:
        def multiplied(x: Tensor, weight: Tensor, out: Tensor) -> None:
            in_bytes = self._held.get(_place(weight)) or weight_in_bytes(weight)
            multiply(input_in_bytes(x), in_bytes, out)

        return gemm.in_blocks(multiplied, x, weight, bias, out_dtype, blocks)


def _place(weight: Tensor) -> tuple[int, torch.Size]:
    return weight.data_ptr(), weight.shape
