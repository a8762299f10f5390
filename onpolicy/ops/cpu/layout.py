"""One memory layout for all inputs of the CPU operators.

Libraries choose kernels by strides and alignment as they do by size. (A column-major input changed
12 of 37 rows of an RMS norm; MKL for Intel's AVX-512 sums over a transposed weight in another
order.) So an operator and its backward pass see only contiguous tensors, whatever views their
callers pass.

PyTorch's CPU kernels run full vectors through SIMD code and the remainder through scalar code, and
for SiLU, GELU or sigmoid the two differ in the last bit: an element's value depends on how many
elements follow it. Padding the flattened input to whole vectors sends every element through the
SIMD code. (Measured with torch 2.13 in float32: 4 % of the elements of SiLU differ; exp, cos, sin
and tanh do not.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 64
"""Alignment in bytes. PyTorch allocates so, and MKL's guide asks for it for reproducible results."""

VECTOR = 128
"""Padding unit in elements, a multiple of every SIMD loop's stride (32 for AVX-512 in float32, 64
in bfloat16)."""


def whole(x: Tensor) -> Tensor:
    """Return `x` contiguous and aligned to ALIGNMENT bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Pad [..., M, K] with rows of zeros to a multiple of `multiple`."""
    missing = -x.shape[-2] % multiple
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def first_rows(x: Tensor, count: int) -> Tensor:
    """Return `x[:count]`, without a slice (as slow as a small kernel) if there are no more rows."""
    return x if len(x) == count else x[:count]


def on_whole_tensors(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a method so that its tensors, and the gradient in the backward pass, go through `whole`."""

    @functools.wraps(operator)
    def called(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = operator(self, *map(_whole, args), **{k: _whole(v) for k, v in kwargs.items()})
        if out.requires_grad:
            out.register_hook(whole)
        return out

    return called


def _whole(argument: Any) -> Any:
    return whole(argument) if isinstance(argument, Tensor) else argument


def whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function that maps each element by itself: contiguous [...] -> [...]."""
    missing = -x.numel() % VECTOR
    if not missing:  # a slice of everything would still be a copy in the backward pass
        return function(x)
    return function(F.pad(x.view(-1), (0, missing)))[: x.numel()].view(x.shape)
