"""One layout in memory for everything that the CPU operators compute with.

Libraries choose kernels by strides and alignment as they do by size. (A column-major input changed
12 of 37 rows of an RMS norm; MKL for Intel's AVX-512 sums over a transposed weight in another order.)
So an operator and its backward pass see contiguous tensors only, wherever their callers cut them from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 64
"""Bytes. PyTorch allocates so, and MKL's guide asks for it where results are to be reproducible."""


def whole(x: Tensor) -> Tensor:
    """`x` contiguous and on a boundary of ALIGNMENT bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """[M, K] with rows of zeros below, to a multiple of so many."""
    missing = -x.shape[0] % multiple
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def first_rows(x: Tensor, count: int) -> Tensor:
    """`x[:count]`, which costs as much as a small kernel where there are no more rows."""
    return x if len(x) == count else x[:count]


def on_whole_tensors(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A method that gets its tensors, and in the backward pass its gradient, through `whole`."""

    @functools.wraps(operator)
    def called(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = operator(self, *map(_whole, args), **{k: _whole(v) for k, v in kwargs.items()})
        if out.requires_grad:
            out.register_hook(whole)
        return out

    return called


def _whole(argument: Any) -> Any:
    return whole(argument) if isinstance(argument, Tensor) else argument
