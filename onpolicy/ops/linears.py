"""Linears that one function computes, over all of K or in blocks of it, and their gradients.

Beside them is the formula by which a low-rank adapter adds to a linear's result, in all engines.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.base import Operators
from onpolicy.ops.row_parallel import WHOLE, RowParallel


class Linears(Operators):
    """Operators whose linears all call `_product`; the backward pass uses PyTorch's own GEMMs."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._linear(x, weight, bias, x.dtype)

    def partial_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._linear(x, weight, None, torch.float32)

    def blockwise_linear(self, x: Tensor, weight: Tensor, blocks: int) -> Tensor:
        return self._linear(x, weight, None, torch.float32, blocks)

    def row_parallel_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, row_parallel: RowParallel
    ) -> Tensor:
        if row_parallel.ranks > 1:
            return super().row_parallel_linear(x, weight, bias, row_parallel)
        return self._linear(x, weight, bias, x.dtype, row_parallel.blocks_of(x.shape[-1]))

    def _linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        blocks: int = 1,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled():
            out: Tensor = _Linear.apply(self, rows, weight, bias, out_dtype, blocks)
        else:
            out = self._product(rows, weight, bias, out_dtype, blocks)
        return out.view(*x.shape[:-1], len(weight))

    @abstractmethod
    def _product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, blocks: int
    ) -> Tensor:
        """Compute row-invariant `x @ weight.T + bias`: [M, K], [N, K], [N] -> [M, N]; no autograd.

        K is summed in equal `blocks`, a power of two, which are added along a binary tree. The bias
        is added in float32, and the result is rounded once. Any strides are allowed.
        """


class _Linear(torch.autograd.Function):
    """A linear whose gradients are deterministic for given shapes."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        linears: Linears,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        blocks: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linears._product(x, weight, bias, out_dtype, blocks)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        _, needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        grad = grad.to(x.dtype)
        return (
            None,
            grad @ weight if needs_x else None,
            grad.t() @ x if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            None,
            None,
        )


class GroupedLinear(torch.autograd.Function):
    """One linear per expert, by a backend's two functions; see `Operators.grouped_linear`."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        product: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor],
        weight_gradient: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor],
        x: Tensor,
        weight: Tensor,
        offsets: Tensor,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Take the forward's function, which gives the gradient of x too, and the weight's gradient.

        weight_gradient: (grad [S, N], x, offsets, dtype) -> [E, N, K]: every expert's `grad.T @ x`,
        summed over its rows in order, zeros without any.
        """
        ctx.save_for_backward(x, weight, offsets)
        ctx.ways = product, weight_gradient  # type: ignore[attr-defined]
        return product(x, weight, offsets, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offsets = ctx.saved_tensors  # type: ignore[attr-defined]
        product, weight_gradient = ctx.ways  # type: ignore[attr-defined]
        _, _, needs_x, needs_weight, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        of_x = product(grad, weight.transpose(1, 2), offsets, x.dtype) if needs_x else None
        of_weight = weight_gradient(grad, x, offsets, weight.dtype) if needs_weight else None
        return None, None, of_x, of_weight, None, None


class Factors(NamedTuple):
    """The factors of an adapter of a linear [N, K], or of a tensor-parallel rank's part of one."""

    a: Tensor
    """[r, K]"""

    b: Tensor
    """[N, r]"""

    scale: float


def add_low_rank(
    operators: Operators,
    x: Tensor,
    out: Tensor,
    factors: Factors,
    row_parallel: RowParallel = WHOLE,
) -> Tensor:
    """Compute `out + scale * (x @ a.T) @ b.T`, rounded once, in the dtype of out.

    x: [..., K]; out: [..., N] -> [..., N]. Each product is rounded to the dtype of x; the sum is
    float32. `row_parallel` says how the first product is summed over K.
    """
    inner = operators.row_parallel_linear(x, factors.a, None, row_parallel)
    added = operators.linear(inner, factors.b)
    return operators.add_scaled(out, added, factors.scale)
