"""Linears that a module calls on one input, as one product: q, k and v, and an MLP's gate and up.

The rollout engine does this, for fewer and larger GEMMs in a decode step; the trainer keeps them
separate. A column of a product has the same bits whatever columns are beside it. The engine tests
this at start-up, at the model's sizes; linears for which it does not hold stay separate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onpolicy.errors import ContractError
from onpolicy.models.rounded_inputs import operators_of
from onpolicy.ops.backends.base import FP8_BLOCK
from onpolicy.ops.base import Operators
from onpolicy.ops.checks.probe import probe
from onpolicy.ops.checks.rowwise_check import FEW_ROW_COUNTS as ROW_COUNTS

logger = logging.getLogger(__name__)

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linears of a module that read the same tensor. If they are called with different
tensors, the results are still right, but each takes a product of its own."""


class JointLinear:
    """A joint forward pass of several linears, whose weights become parts of one tensor.

    `linears`: weight [N_i, K] each, and all of them or none with a bias [N_i].
    """

    def __init__(self, linears: Sequence[Any], operators: Operators):
        self.linears, self.operators = linears, operators
        self.sizes = [len(linear.weight) for linear in linears]
        self.weight = _joined([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears]
        self.bias = None if biases[0] is None else _joined(biases)
        self._x: Tensor | None = None
        self._parts: list[Tensor | None] = [None] * len(linears)
        for number, linear in enumerate(linears):
            linear.forward = partial(self._forward, number)

    def _forward(self, number: int, x: Tensor) -> Tensor:
        """Compute [..., K] -> [..., N_i]; the first linear that is called computes all of them."""
        # A new input, or a second call of the same linear: compute the joint product again.
        if x is not self._x or self._parts[number] is None:
            self._x = x
            operators = operators_of(self.linears[0], self.operators)
            product = operators.linear(x, self.weight, self.bias)
            self._parts = list(product.split(self.sizes, dim=-1))
        # Every part is returned once. After the last one the input is no longer referenced.
        part, self._parts[number] = self._parts[number], None
        if all(part is None for part in self._parts):
            self._x = None
        assert part is not None
        return part

    def require_joint(self) -> None:
        """Raise ContractError if a linear's weight is no longer a part of the joint weight."""
        for joint, parts in (
            (self.weight, [linear.weight for linear in self.linears]),
            (self.bias, [linear.bias for linear in self.linears]),
        ):
            start = 0 if joint is None else joint.data_ptr()
            for part in parts if joint is not None else ():
                if part.data_ptr() != start:
                    raise ContractError(
                        f"shape={tuple(part.shape)}: a loader put a weight into memory of its own, and "
                        "the engine would go on with the old one. Restart the engine, and report this."
                    )
                start += part.numel() * part.element_size()


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return one tensor along the first axis, and make the parameters views of it."""
    joint = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joint.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return joint


def join_linears(
    model: nn.Module, operators: Operators, may_join: Callable[[nn.Module], bool]
) -> list[JointLinear]:
    """Join siblings of `model` in place, where the joint product has the bits of the separate products.

    `may_join`: whether a linear computes `Operators.linear` of its input and nothing else.
    """
    proven: dict[tuple[Any, ...], bool] = {}
    joint = []
    for linears in _siblings(model, may_join):
        key = _sizes(linears)
        if key not in proven:
            proven[key] = _keeps_bits(operators, linears)
            if not proven[key]:
                logger.warning("linears of sizes %s stay apart: together they have other bits", key)
        if proven[key]:
            joint.append(JointLinear(linears, operators))
    return joint


def _siblings(model: nn.Module, may_join: Callable[[nn.Module], bool]) -> Iterator[list[Any]]:
    for module in model.modules():
        for names in SIBLINGS:
            linears: list[Any] = [module._modules.get(name) for name in names]
            if all(linear is not None and may_join(linear) for linear in linears):
                *_, dtypes, inner, has_bias = zip(*map(_kind, linears), strict=True)
                if len(set(dtypes)) == len(set(inner)) == len(set(has_bias)) == 1:
                    yield linears


def _kind(linear: Any) -> tuple[int, torch.dtype, int, bool]:
    rows, inner = linear.weight.shape
    return rows, linear.weight.dtype, inner, linear.bias is not None


def _sizes(linears: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(_kind, linears))


def _keeps_bits(operators: Operators, linears: Sequence[Any]) -> bool:
    """Return whether a joint product has the bits of the separate ones, for any number of rows.

    On a CPU, which sums bfloat16 in float32, float32 is tested too: rounding hides most of a sum.
    """
    device, dtype = linears[0].weight.device, linears[0].weight.dtype
    dtypes = {dtype} | ({torch.float32} if device.type == "cpu" else set())
    ways = [operators]
    if all(size % FP8_BLOCK == 0 for linear in linears for size in linear.weight.shape):
        ways += {operators.of_rounded} - {operators}
    return all(_keeps_bits_in(each, way, linears) for way in ways for each in dtypes)


def _keeps_bits_in(dtype: torch.dtype, operators: Operators, linears: Sequence[Any]) -> bool:
    device, inner = str(linears[0].weight.device), linears[0].weight.shape[1]
    sizes, has_bias = [len(linear.weight) for linear in linears], linears[0].bias is not None
    weight = probe(sum(sizes), inner, seed=21, device=device).div_(inner**0.5).to(dtype)
    bias = probe(sum(sizes), seed=22, device=device).to(dtype) if has_bias else None
    weights = weight.split(sizes)
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    rows = probe(max(ROW_COUNTS), inner, seed=23, device=device).to(dtype)
    return all(
        torch.equal(together, operators.linear(rows[:count], *own))
        for count in ROW_COUNTS
        for together, own in zip(
            operators.linear(rows[:count], weight, bias).split(sizes, dim=-1),
            zip(weights, biases, strict=True),
            strict=True,
        )
    )
