"""Linear by DeepGEMM's bfloat16 product, called in the one way that does not depend on the batch.

Row invariance: the kernel walks K in ascending blocks of 64 into one float32 accumulator and never
splits it. The number of rows M chooses the size of the output's tiles, not the order of a sum. From
version 0.2 on, DeepGEMM passes bfloat16 products to cuBLASLt, whose sums do depend on M, unless its
deterministic algorithms are switched on; older versions have no switch and no other kernel.
Sources: csrc/apis/gemm.hpp and csrc/jit_kernels/heuristics/sm90.hpp of sgl-project/DeepGEMM.

The first call of a kernel compiles it (seconds); the result is kept in a cache on disk, one for
both engines (`compat/process.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from onpolicy.errors import ContractError
from onpolicy.ops.backends.base import GEMM_COLUMNS
from onpolicy.ops.cuda_toolkit import REMEDY, CudaToolkit, find_cuda_toolkit
from onpolicy.ops.triton.block_sums import add_blocks

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


def deep_gemm_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, blocks: int = 1
) -> Tensor:
    """Compute `_product` of `onpolicy.ops.linears.Linears`; no autograd."""
    return in_blocks(multiply, x, weight, bias, out_dtype, blocks)


def in_blocks(
    multiply: Callable[[Tensor, Tensor, Tensor], None],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    blocks: int,
) -> Tensor:
    """Compute `deep_gemm_linear` by a function that writes the product of one block; see `multiply`.

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
