"""Linear by DeepGEMM's bfloat16 and FP8 products, called in the way that depends on no batch.

Row invariance: the kernels walk K in ascending blocks (64 in bfloat16, 128 in FP8) into one float32
accumulator and never split it. The number of rows chooses the size of tiles and the loads that they
share, not the order of a sum. From version 0.2 on, DeepGEMM passes bfloat16 products to cuBLASLt,
whose sums do depend on the rows, unless its deterministic algorithms are switched on; older
versions have no switch and no other kernel. The first call of a kernel compiles it (seconds); the
result is kept in a cache on disk, one for both engines (`compat/process.py`).

FP8 operands are given as their dequantised values in bfloat16. Rounding these again gives the same
numbers and scales, bit for bit, so the rounded weight alone is enough: there is a scale for each
row of the input, and for each 128 x 128 of the weight. The tensor cores sum a block in four steps
of 32, and that sum, times the product of both scales, is added to the accumulator. The dtype of the
result chooses between two kernels: one can write only bfloat16; the other can only add to float32,
here to zeros, and needs scales for each row of the weight. The FP8 part is read from the source and
has not run on a GPU.

Sources: csrc/apis/{gemm,layout}.hpp and csrc/jit_kernels/heuristics/sm90.hpp of
sgl-project/DeepGEMM; sm90_fp8_gemm_1d1d.cuh and sm90_fp8_gemm_1d2d.cuh of sgl-deep-gemm 0.1.5.post1
and 0.2.5.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onpolicy.errors import ContractError
from onpolicy.ops.backends.base import FP8_BLOCK as BLOCK
from onpolicy.ops.backends.base import GEMM_COLUMNS
from onpolicy.ops.linears import Linears
from onpolicy.ops.machine import REMEDY, CudaToolkit, find_cuda_toolkit
from onpolicy.ops.triton.block_sums import add_blocks
from onpolicy.weights.rounding import FP8, quantise

ALIGNMENT = 8
"""bfloat16 values in 16 bytes: TMA needs this alignment of the start and the stride of rows."""


@cache
def loaded() -> ModuleType:
    """Load the module `deep_gemm` with its batch-invariant kernels, or raise ContractError.

    CUDA_HOME is set first to the toolkit that was found, since the module reads it at import.
    """
    toolkit = find_cuda_toolkit()
    if toolkit.home is not None:
        os.environ["CUDA_HOME"] = toolkit.home
    try:
        import deep_gemm
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise ContractError(
            f"deep_gemm: cannot be loaded with torch {torch.__version__} ({_reason(error, toolkit)}"
        ) from error
    if hasattr(deep_gemm, "use_deterministic_algorithms"):
        deep_gemm.use_deterministic_algorithms(True)
    module: ModuleType = deep_gemm
    return module


def _reason(error: Exception, toolkit: CudaToolkit) -> str:
    """Return the missing part and the remedy; deep_gemm only asserts that there is a CUDA toolkit."""
    if isinstance(error, AssertionError) and toolkit.home is None:
        return f"it compiles its kernels with a CUDA toolkit, and {toolkit.problem}). {REMEDY}"
    return (
        f"{error or type(error).__name__}). Install the version of sgl-deep-gemm that the installed "
        "SGLang asks for (pip install -e '.[gpu]'), or choose --operators triton."
    )


def fits(weight: Tensor, blocks: int = 1) -> bool:
    """Return whether DeepGEMM can multiply by `blocks` of `weight` [N, K], whatever the input."""
    N, K = weight.shape
    is_aligned = N % GEMM_COLUMNS == 0 and K % (blocks * ALIGNMENT) == 0
    return weight.dtype == torch.bfloat16 and is_aligned


def multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write `x @ weight.T`: bfloat16 [M, K], [N, K] -> bfloat16 or float32 [M, N]; no autograd.

    `weight` may be the transpose of a contiguous matrix.
    """
    by_row = weight.stride(1) == 1
    columns = readable(weight) if by_row else readable(weight.t()).t()
    loaded().bf16_gemm_nt(readable(x), columns, out)


def readable(matrix: Tensor) -> Tensor:
    """Return `matrix`, or a copy, with unit column stride and 16-byte aligned rows, as TMA needs it.

    DeepGEMM chooses kernels by the strides that it sees. PyTorch calls any single row contiguous,
    whatever its stride, so this function compares strides and does not call `is_contiguous`: one
    row must not take another kernel than the batch that it stands in.
    """
    row, column = matrix.stride()
    fits = column == 1 and row >= matrix.shape[1] and row % ALIGNMENT == 0
    if fits and matrix.data_ptr() % 16 == 0:
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def in_blocks(
    multiply: Callable[[Tensor, Tensor, Tensor], None],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    blocks: int = 1,
) -> Tensor:
    """Compute `_product` of `onpolicy.ops.linears.Linears` by a function that writes the product of
    one block; see `multiply`. No autograd.

    Sums with a bias or over several blocks stay float32 until they are complete, as in the Triton
    operators. (SGLang's own operators round before they add a bias, and after.)
    """
    shape = len(x), len(weight)
    if blocks == 1 and bias is None:
        out = x.new_empty(shape, dtype=out_dtype)
        multiply(x, weight, out)
        return out
    products = x.new_empty(blocks, *shape, dtype=torch.float32)
    for block in zip(x.chunk(blocks, 1), weight.chunk(blocks, 1), products, strict=True):
        multiply(*block)
    return add_blocks(products, bias, out_dtype)


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


def multiply_fp8(x: Bytes, weight: Bytes, out: Tensor) -> None:
    """Write the product of the dequantised values: [M, K], [N, K] -> bfloat16 or float32 [M, N]."""
    product = loaded().fp8_gemm_nt
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
            multiply_fp8(input_in_bytes(x), in_bytes, out)

        return in_blocks(multiplied, x, weight, bias, out_dtype, blocks)


def _place(weight: Tensor) -> tuple[int, torch.Size]:
    return weight.data_ptr(), weight.shape
