"""The gated delta rule with gradients, from the forward and the backward pass of a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.recurrence import RecurrentLayout


class DeltaInputs(NamedTuple):
    """The inputs of the rule; see `Operators.gated_delta`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def group(self) -> int:
        """Return the number of value heads that share a key head."""
        return self.v.shape[1] // self.k.shape[1]

    def of_heads(self, first: int, count: int) -> DeltaInputs:
        """Return `count` key heads from `first` on, and the value heads that share them."""
        keys, values = slice(first, first + count), self.values_of(first, count)
        return DeltaInputs(self.q[:, keys], self.k[:, keys], *(x[:, values] for x in self[2:]))

    def values_of(self, first: int, count: int) -> slice:
        """Return the value heads of these key heads."""
        return slice(first * self.group, (first + count) * self.group)


Forward = Callable[[DeltaInputs, RecurrentLayout, Tensor | None], Tensor]
"""(inputs, layout, states; None for whole sequences) -> [T, H_v, D_v]."""

Backward = Callable[[Tensor, DeltaInputs, RecurrentLayout], DeltaInputs]
"""(gradient of the result, inputs, layout) -> the gradients of the inputs, in their dtypes."""

DeltaWays = tuple[Forward, Backward, DeltaInputs]
"""How a backend computes the rule and its gradient, and the inputs as both need them."""


def gated_delta(ways: DeltaWays, layout: RecurrentLayout, states: Tensor | None) -> Tensor:
    """Compute `Operators.gated_delta` by a backend's two functions."""
    forward, gradients, inputs = ways
    if states is not None or not torch.is_grad_enabled():
        return forward(inputs, layout, states)
    out: Tensor = _GatedDelta.apply(forward, gradients, layout, *inputs)
    return out


class _GatedDelta(torch.autograd.Function):
    """The rule with a backward pass, which computes the states again rather than keep them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        forward: Forward,
        gradients: Backward,
        layout: RecurrentLayout,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.how = gradients, layout  # type: ignore[attr-defined]
        return forward(DeltaInputs(*inputs), layout, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, layout = ctx.how  # type: ignore[attr-defined]
        inputs = DeltaInputs(*ctx.saved_tensors)  # type: ignore[attr-defined]
        return None, None, None, *gradients(grad, inputs, layout)
