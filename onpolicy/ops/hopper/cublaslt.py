"""PyTorch's own bfloat16 products, by cuBLASLt without split-K.

cuBLASLt chooses a kernel by all sizes of a product, the number of rows among them. Split-K, which cuts
a sum over K into parts, is the known reason why a row's bits then depend on it. A kernel may cut sums
only if there is memory for the parts (`NO_SPLIT_K` in `onpolicy/contract.py`) and PyTorch allows it;
where cuBLASLt finds no other kernel, PyTorch raises an error, since cuBLAS cannot be told. NVIDIA
promises no order of sums, and a kernel for a single row might have one of its own (PyTorch avoids that
kernel on GPUs of 10.0 and newer alone), so the self-check decides. All this was read in PyTorch's
source (aten/src/ATen/cuda/CUDABlas.cpp); none of it has run on a GPU. vLLM's batch-invariant mode uses
the same settings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onpolicy.ops.hopper.gemm import readable


def forbid_split_k() -> None:
    """Let cuBLASLt compute all products of this process, those of bfloat16 without split-K."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


def multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write `x @ weight.T`: bfloat16 [M, K], [N, K] -> bfloat16 or float32 [M, N]; no autograd.

    Rows of x always lie end to end, since a single row has no stride of its own.
    """
    by_row = weight.stride(1) == 1
    columns = readable(weight).t() if by_row else readable(weight.t())
    torch.mm(readable(x.contiguous()), columns, out_dtype=out.dtype, out=out)
