"""FP8 inputs of linears, with a scale for each token, as FP8 kernels use them.

Both engines round the inputs of linears and experts by the same function, and multiply the
dequantised values in their own dtype; in linears, operators may multiply the FP8 bytes
(`Operators.of_rounded`). Where tensor-parallel ranks may shard K, each block of
`row_parallel_blocks` has its own scale, so that ranks need not communicate. Output projections,
routers and the second factor of an adapter read unrounded inputs. The gradient is straight-through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onpolicy.ops.base import Operators
from onpolicy.ops.mixture_of_experts import Gate
from onpolicy.ops.row_parallel import WHOLE, RowParallel
from onpolicy.weights.rounding import is_rounded, round_weight, straight_through


class InputRounding:
    """The rounding of the inputs of a model's linears and experts; a shared input is rounded once."""

    def __init__(self, activation_format: str):
        self.activation_format = activation_format
        self._last: tuple[Tensor, int, Tensor] | None = None

    def __call__(self, x: Tensor, block: int = 0) -> Tensor:
        """Round [..., K] in its dtype; `block` elements of a row share a scale, 0: all of them."""
        block = block or x.shape[-1]
        if self._last is None or self._last[0] is not x or self._last[1] != block:
            self._last = x, block, self._rounded(x, block)
        return self._last[2]

    def _rounded(self, x: Tensor, block: int) -> Tensor:
        def rounded(x: Tensor) -> Tensor:
            rows = x.reshape(-1, block)
            return round_weight(rows, self.activation_format).view(x.shape)

        with torch._C.DisableTorchFunction():  # bypass the mode of a block of experts
            return straight_through(x, rounded)

    def of_linear(self, linear: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return a linear's arguments with the first one rounded; this is a forward pre-hook."""
        row_parallel: RowParallel = getattr(linear, "row_parallel", WHOLE)
        return (self(args[0], row_parallel.block_of(linear.weight.shape[1])), *args[1:])

    def after(self, gate: Gate, row_parallel: RowParallel) -> Gate:
        """Return the gate of experts with a rounded result, the input of the second product."""

        def rounded(gate_up: Tensor) -> Tensor:
            hidden = gate(gate_up)
            return self(hidden, row_parallel.block_of(hidden.shape[-1]))

        return rounded

    def forget(self, *_: Any) -> None:
        """Drop the last input once the module that holds the linears has run: nobody reads it again."""
        self._last = None


def reads_rounded(linear: Any) -> bool:
    """Return whether `round_inputs` marked this linear."""
    return getattr(linear, "reads_rounded", False)


def operators_of(linear: Any, operators: Operators) -> Operators:
    """Return the operators that a linear computes with: `of_rounded` if its inputs are rounded."""
    return operators.of_rounded if reads_rounded(linear) else operators


def round_inputs(model: nn.Module, activation_format: str, linears: tuple[type[Any], ...]) -> None:
    """Make linears of these classes, and experts (modules with a `rounding`), read rounded inputs.

    Only linears whose weights are rounded read rounded inputs. Do nothing for an empty format.
    """
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
