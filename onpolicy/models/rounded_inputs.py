"""Inputs of linears in FP8, with a scale for each token, as where one multiplies in FP8.

Both engines round what a linear, or an expert, reads by the same function, and multiply what numbers and
scales come to in their own dtype; in linears, operators may multiply bytes (`Operators.of_rounded`).
Where tensor-parallel ranks may share K, each block of `row_parallel_blocks` has a scale of its own, so
that no rank asks another. Output projections, routers and the second factor of an adapter read what they
always do. A gradient passes straight through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onpolicy.ops.base import Operators
from onpolicy.ops.experts import Gate
from onpolicy.ops.row_parallel import WHOLE, RowParallel
from onpolicy.weights.rounding import is_rounded, round_weight, straight_through


class InputRounding:
    """Rounds what a model's linears and experts read; once, if several of them read it."""

    def __init__(self, activation_format: str):
        self.activation_format = activation_format
        self._last: tuple[Tensor, int, Tensor] | None = None

    def __call__(self, x: Tensor, block: int = 0) -> Tensor:
        """[..., K] -> [..., K] in its dtype; `block` numbers of a row share a scale, 0: all."""
        block = block or x.shape[-1]
        if self._last is None or self._last[0] is not x or self._last[1] != block:
            self._last = x, block, self._rounded(x, block)
        return self._last[2]

    def _rounded(self, x: Tensor, block: int) -> Tensor:
        def rounded(x: Tensor) -> Tensor:
            rows = x.reshape(-1, block)
            return round_weight(rows, self.activation_format).view(x.shape)

        with torch._C.DisableTorchFunction():  # of a block of experts (`by_operators.py`)
            return straight_through(x, rounded)

    def of_linear(self, linear: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A linear's arguments, the first one rounded: a hook before its forward pass."""
        row_parallel: RowParallel = getattr(linear, "row_parallel", WHOLE)
        return (self(args[0], row_parallel.block_of(linear.weight.shape[1])), *args[1:])

    def after(self, gate: Gate, row_parallel: RowParallel) -> Gate:
        """The gate of experts, whose result their second product reads."""

        def rounded(gate_up: Tensor) -> Tensor:
            hidden = gate(gate_up)
            return self(hidden, row_parallel.block_of(hidden.shape[-1]))

        return rounded

    def forget(self, *_: Any) -> None:
        """Once the module that holds the linears has run, nobody reads the same input again."""
        self._last = None


def reads_rounded(linear: Any) -> bool:
    """Return whether `round_inputs` was told of this linear."""
    return getattr(linear, "reads_rounded", False)


def operators_of(linear: Any, operators: Operators) -> Operators:
    """Those of `operators` that a linear computes by."""
    return operators.of_rounded if reads_rounded(linear) else operators


def round_inputs(model: nn.Module, activation_format: str, linears: tuple[type[Any], ...]) -> None:
    """Have the linears of `model`, modules of these classes, and its experts, modules with a `rounding`,
    read rounded inputs from now on: those whose weights formats are for. An empty one rounds nothing."""
    if not activation_format:
        return
    rounding = InputRounding(activation_format)
    for name, module in model.named_modules():
        if hasattr(module, "rounding"):
            module.rounding = rounding
            module.register_forward_hook(rounding.forget)
        children: list[tuple[str, Any]] = list(module.named_children())
        for leaf, child in children:
            if isinstance(child, linears) and is_rounded(f"{name}.{leaf}.weight", child.weight):
                child.reads_rounded = True
                child.register_forward_pre_hook(rounding.of_linear)
                module.register_forward_hook(rounding.forget)
