"""The same numbers in other places: tensors as callers cut them out of larger ones."""

from __future__ import annotations

from torch import Tensor


def whole(x: Tensor) -> Tensor:
    return x.clone()


def offset(x: Tensor) -> Tensor:
    """Off the boundaries that vectors are loaded from."""
    return x.new_empty(x.numel() + 3)[3:].view(x.shape).copy_(x)


def strided(x: Tensor) -> Tensor:
    """Every second number."""
    return x.new_empty(*x.shape[:-1], 2 * x.shape[-1])[..., ::2].copy_(x)


def wider(x: Tensor) -> Tensor:
    """Rows of a wider matrix."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] + 5)[..., 3:-2].copy_(x)


def transposed(x: Tensor) -> Tensor:
    """Column after column."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def expanded(x: Tensor) -> Tensor:
    """The first row, or number, for all: other numbers than x."""
    return x[:1].expand(x.shape)


LAYOUTS = (whole, offset, strided, wider, transposed, expanded)
