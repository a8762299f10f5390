"""Linear by DeepGEMM: one float32 sum over K, the bias added to it, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from onpolicy.ops.hopper import gemm
from onpolicy.ops.triton.linear import TritonLinear


def deep_gemm_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Row-invariant `x @ weight.T + bias`: [M, K], [N, K], [N] -> [M, N]; no autograd.

    With a bias the product is left in float32 until the bias is in, as the Triton operators and
    `Operators.row_parallel_linear` do it. (SGLang's own operators round before and after.)
    """
    if bias is None:
        return gemm.multiply(x, weight, out_dtype)
    return gemm.multiply(x, weight, torch.float32).add_(bias.float()).to(out_dtype)


class HopperLinear(TritonLinear):
    """The forward above; the backward is that of the Triton operators, PyTorch's own GEMMs."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return deep_gemm_linear(x, weight, bias, out_dtype)
