"""The aligned operators on Hopper GPUs (H100, H200), in bfloat16.

Matrix products are DeepGEMM's or cuBLASLt's, and attention is FlashAttention-3, in the builds that
SGLang runs; everything else, and layouts that they do not support, is inherited from the Triton
operators.

Experts are inherited too: DeepGEMM's grouped product pads every expert to 128 rows and can only
write bfloat16, while the experts of a token are added in float32 before they are rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onpolicy.contract import FLASH_CHUNK
from onpolicy.ops.base import Operators
from onpolicy.ops.differentiable_attention import attend
from onpolicy.ops.hopper import cublaslt, flash_attention, gemm
from onpolicy.ops.hopper.gemm import Fp8Linears
from onpolicy.ops.layouts import AttentionLayout, PagedLayout, ScoreRule
from onpolicy.ops.triton import TritonOperators


class _LibraryLinears(TritonOperators):
    """Triton operators with a library's products, where it supports them."""

    multiply: Callable[[Tensor, Tensor, Tensor], None]
    """The library's product of one block; see `gemm.multiply`."""

    def _product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, blocks: int
    ) -> Tensor:
        if not gemm.fits(weight, blocks):
            return super()._product(x, weight, bias, out_dtype, blocks)
        return gemm.in_blocks(self.multiply, x, weight, bias, out_dtype, blocks)


class DeepGemmLinears(_LibraryLinears):
    """Triton operators with DeepGEMM's products.

    Creating them loads DeepGEMM, or raises ContractError.
    """

    multiply = staticmethod(gemm.multiply)

    def __init__(self) -> None:
        super().__init__()
        gemm.loaded()


class FlashAttention(TritonOperators):
    """Triton operators with FlashAttention-3.

    Creating them loads FlashAttention-3, or raises ContractError.
    """

    key_chunk = FLASH_CHUNK

    def __init__(self) -> None:
        super().__init__()
        flash_attention.loaded()

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scores: ScoreRule
    ) -> Tensor:
        if not flash_attention.fits(q, v, scores):
            return super().attention(q, k, v, layout, scores)
        ways = flash_attention.forward, flash_attention.backward
        return attend(*ways, q.contiguous(), k.contiguous(), v.contiguous(), layout, scores)

    def paged_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: PagedLayout,
        scores: ScoreRule,
        out: Tensor | None = None,
    ) -> Tensor:
        if not flash_attention.fits(q, v, scores):
            return super().paged_attention(q, k, v, layout, scores, out)
        return flash_attention.over_pages(q, k, v, layout, scores, out)


class HopperOperators(DeepGemmLinears, FlashAttention):
    """Row-invariant operators with both libraries.

    Creating them loads both, or raises ContractError.
    """


class CublasLtOperators(_LibraryLinears, FlashAttention):
    """Row-invariant operators with FlashAttention-3 and cuBLASLt's products, gradients' included.

    Creating them loads FlashAttention-3, or raises ContractError, and forbids split-K in the process.
    """

    multiply = staticmethod(cublaslt.multiply)

    def __init__(self) -> None:
        super().__init__()
        cublaslt.forbid_split_k()


class HopperFp8Operators(HopperOperators):
    """`HopperOperators` with DeepGEMM's FP8 products for linears that read rounded inputs.

    Experts with rounded inputs multiply the dequantised values, as under `HopperOperators`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_rounded = _OfRounded()

    @property
    def of_rounded(self) -> Operators:
        return self._of_rounded


class _OfRounded(Fp8Linears, HopperOperators):
    pass
