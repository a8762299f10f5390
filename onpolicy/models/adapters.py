"""Low-rank adapters (LoRA) beside the linears of a model, the same ones in both engines.

    y = x W^T + s (x A^T) B^T

A: [r, K]; B: [N, r]. W is frozen, A and B are trained. Both products are `Operators.linear`, each
rounded to the dtype of x; the scaled second one is added to x W^T in float32, and the sum is rounded.
The trainer's linear and SGLang's have the same module beside them, which a forward hook calls, so they
do the same to the same bits.
Source: Hu et al., LoRA (arXiv 2106.09685), eq. 3; s = alpha / sqrt(r) is Kalajdzievski, rsLoRA
(arXiv 2312.03732), eq. 4.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onpolicy.contract import AdapterShape
from onpolicy.errors import ConfigError
from onpolicy.ops.base import Operators

CHILD = "lora"
"""What an adapter is called among the modules of its linear."""

ALL_LINEAR = "all-linear"


class LowRank(nn.Module):
    """What is added to the result of one linear."""

    def __init__(self, linear: Any, operators: Operators, shape: AdapterShape):
        super().__init__()
        out_features, in_features = linear.weight.shape
        self.operators, self.scale, self.is_on = operators, shape.scale, True
        like = linear.weight.detach()
        self.A = nn.Parameter(like.new_zeros(shape.rank, in_features))
        self.B = nn.Parameter(like.new_zeros(out_features, shape.rank))

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """[..., K] and what the linear gives, [..., N] -> [..., N] in its dtype."""
        if not self.is_on:
            return out
        added = self.operators.linear(self.operators.linear(x, self.A), self.B)
        return (out.float() + added.float() * self.scale).to(out.dtype)


def add_adapters(model: nn.Module, operators: Operators, shape: AdapterShape | None) -> None:
    """Put adapters, which are zeros, beside the linears of `model` that a contract names; all else is
    frozen from now on. Without a shape nothing is done.

    Raises ConfigError if the model does not have one of the names.
    """
    if shape is None:
        return
    model.requires_grad_(False)
    linears = [m for name, m in model.named_modules() if _leaf(name) in shape.targets]
    missing = set(shape.targets) - {_leaf(name) for name, _ in model.named_modules()}
    if missing:
        raise ConfigError(
            f"--lora-target-modules: the model has no {', '.join(sorted(missing))}, so nothing would be "
            "adapted there. Name linears that it has."
        )
    for linear in linears:
        linear.add_module(CHILD, LowRank(linear, operators, shape))
        linear.register_forward_hook(_add)


def _add(linear: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    adapter: LowRank = linear._modules[CHILD]  # type: ignore[assignment]
    added: Tensor = adapter(args[0], out)
    return added


def adapters(model: nn.Module) -> Iterator[LowRank]:
    """Those of a model, in its order."""
    return (module for module in model.modules() if isinstance(module, LowRank))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Meanwhile the model computes as if it had none."""
    found = list(adapters(model))
    for adapter in found:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.is_on = True


def is_adapters(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return f".{CHILD}." in name


def first_values(name: str, shape: torch.Size, seed: int) -> Tensor:
    """What training begins with, in float32: zeros for B, and for A numbers of absolute value below
    1 / sqrt(K), as PEFT draws them, from the run's seed and the parameter's name alone."""
    if name.endswith(".B"):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])


def target_names(model: nn.Module, asked: str) -> tuple[str, ...]:
    """The last parts of the names of the linears that are to be adapted, sorted.

    asked: names with commas between, or ALL_LINEAR, which is every linear but the output projection.
    Raises ConfigError for a name that the model does not have, and for what is not a plain linear.
    """
    kinds: dict[str, set[type]] = {}
    for name, module in model.named_modules():
        if name:
            kinds.setdefault(_leaf(name), set()).add(type(module))
    head = {_leaf(name) for name, m in model.named_modules() if m is _output_of(model)}
    linears = {name for name, types in kinds.items() if types == {nn.Linear}} - head
    names = linears if asked == ALL_LINEAR else {name.strip() for name in asked.split(",")}
    for name in sorted(names - linears):
        rule = (
            "is the output projection, which is not adapted yet" if name in head
            else "is not a plain linear of this model" if name in kinds
            else "is no module of this model"
        )  # fmt: skip
        raise ConfigError(
            f"--lora-target-modules={asked}: {name!r} {rule}. Choose from {', '.join(sorted(linears))}."
        )
    return tuple(sorted(names))


def _output_of(model: Any) -> Any:
    return model.get_output_embeddings()


def adapter_linears(model: nn.Module, shape: AdapterShape) -> set[tuple[int, int, bool]]:
    """What `OperatorShapes.linear` says of the products with A and B."""
    sizes, rank = adapted_sizes(model, shape), shape.rank
    return {(rank, k, False) for _, k in sizes} | {(n, rank, False) for n, _ in sizes}


def adapted_sizes(model: nn.Module, shape: AdapterShape) -> list[tuple[int, int]]:
    """(N, K) of each linear of a model, without adapters, that is to get one."""
    return [
        (module.weight.shape[0], module.weight.shape[1])
        for name, module in model.named_modules()
        if _leaf(name) in shape.targets and isinstance(module, nn.Linear)
    ]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
