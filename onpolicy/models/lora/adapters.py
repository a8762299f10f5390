"""Low-rank adapters (LoRA) beside the linears of a model, the same ones in both engines.

    y = x W^T + s (x A^T) B^T

A: [r, K]; B: [N, r]. W is frozen, A and B are trained. Both products are `Operators.linear`, each
rounded to the dtype of x; the scaled second one is added to x W^T in float32, and the sum is
rounded. Where tensor-parallel ranks shard N, each has its rows of B; where they shard K, each has
its columns of A, and x A^T is summed over blocks of K as x W^T is. The other factor is replicated.
The trainer's linear and SGLang's have the same module beside them, which a forward hook calls, so
both compute the same bits. Experts have a pair of factors for each expert and matrix. Gate and up,
which transformers holds in one matrix, share one pair, as in PEFT's `target_parameters`.
Source: Hu et al., LoRA (arXiv 2106.09685), eq. 3; s = alpha / sqrt(r) is Kalajdzievski, rsLoRA
(arXiv 2312.03732), eq. 4.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onpolicy.contract import AdapterShape, OperatorShapes
from onpolicy.errors import ConfigError
from onpolicy.models.expert_layers import AlignedExperts, choosers, expert_sizes, has_usual_experts
from onpolicy.models.tensor_parallel import row_parallel_linears
from onpolicy.ops.base import Operators
from onpolicy.ops.linears import Factors, add_low_rank
from onpolicy.ops.mixture_of_experts import ExpertFactors
from onpolicy.ops.row_parallel import WHOLE, RowParallel

CHILD = "lora"
"""The name of an adapter among the children of its linear."""

ALL_LINEAR = "all-linear"

FactorValues = Callable[[str, torch.Size], Tensor | None]
"""(a factor's name in transformers' model, its whole shape) -> its values; None leaves it as it is."""


class LowRankModule(nn.Module):
    """The base of adapters, which add to one or more products of a model while they are on."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale, self.is_on = scale, True


class LowRank(LowRankModule):
    """The adapter of one linear, or of a tensor-parallel rank's part of it."""

    def __init__(self, linear: Any, operators: Operators, shape: AdapterShape):
        super().__init__(shape.scale)
        out_features, in_features = _features(linear)
        self.operators = operators
        self.row_parallel: RowParallel = getattr(linear, "row_parallel", WHOLE)
        like = linear.weight.detach()
        self.A = nn.Parameter(like.new_zeros(shape.rank, in_features))
        self.B = nn.Parameter(like.new_zeros(out_features, shape.rank))

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """Add the adapter to the linear's result `out`: [..., K], [..., N] -> [..., N] in its dtype."""
        if not self.is_on:
            return out
        x = self.row_parallel.own_part(x, self.A.shape[1])
        return add_low_rank(self.operators, x, out, self.factors, self.row_parallel)

    @property
    def factors(self) -> Factors:
        return Factors(self.A, self.B, self.scale)


def _features(linear: Any) -> tuple[int, int]:
    """Return (N, K) of this process's part of a linear's result.

    SGLang's ranks may shard W and gather the result, and their output projection may be padded with
    rows of no token.
    """
    rows, columns = linear.weight.shape
    if getattr(linear, "gather_output", False):
        rows = linear.output_size
    return min(rows, getattr(linear, "org_vocab_size", rows)), columns


class Pair(nn.Module):
    """The two factors of one adapter, where a module has several."""

    def __init__(self, a: Tensor, b: Tensor):
        super().__init__()
        self.A, self.B = nn.Parameter(a), nn.Parameter(b)


class ExpertLowRank(LowRankModule):
    """The adapter of a layer's experts, or of a tensor-parallel rank's part of them.

    gate_up.A: [E, r, H]; gate_up.B: [E, 2, I / P, r]; down.A: [E, r, I / P]; down.B: [E, H, r].
    """

    def __init__(self, like: Tensor, sizes: tuple[int, int, int], shape: AdapterShape):
        """Create zero factors with the dtype and device of `like`; sizes: E, I / P and H."""
        super().__init__(shape.scale)
        (count, inner, hidden), rank = sizes, shape.rank
        # Gate and up have separate axes, so that a rank's part of both is one block of B.
        new = like.new_zeros
        self.gate_up = Pair(new(count, rank, hidden), new(count, 2, inner, rank))
        self.down = Pair(new(count, rank, inner), new(count, hidden, rank))

    @property
    def factors(self) -> ExpertFactors:
        return ExpertFactors(self._factors(self.gate_up), self._factors(self.down))

    def _factors(self, pair: Pair) -> Factors:
        return Factors(pair.A, pair.B.flatten(1, -2), self.scale)


def expert_adapter_size(experts: Any, adapter: AdapterShape) -> int:
    """Return the number of elements in the adapters of a layer's experts."""
    count, inner, hidden = expert_sizes(experts)
    return count * adapter.rank * (2 * hidden + 3 * inner)


def add_adapters(model: nn.Module, operators: Operators, shape: AdapterShape | None) -> None:
    """Put adapters, all zeros, beside the linears that the contract names, and freeze everything else.

    Do nothing without a shape.
    Raise ConfigError if the model lacks one of the names.
    """
    if shape is None:
        return
    model.requires_grad_(False)
    # A vision tower has linears of the same names, and stays as it is.
    named = [(name, m) for name, m in model.named_modules() if ".tower." not in name]
    chosen = [m for name, m in named if _leaf(name) in shape.targets]
    missing = set(shape.targets) - {_leaf(name) for name, _ in named}
    if missing:
        raise ConfigError(
            f"--lora-target-modules: the model has no {', '.join(sorted(missing))}, so nothing would be "
            "adapted there. Name linears that it has."
        )
    for module in chosen:
        if isinstance(module, AlignedExperts):
            like = module.down_proj.detach()
            module.lora = ExpertLowRank(like, expert_sizes(module), shape)
        else:
            module.add_module(CHILD, LowRank(module, operators, shape))
            module.register_forward_hook(_add)


def _add(linear: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    adapter: LowRank = linear._modules[CHILD]
    added: Tensor = adapter(args[0], out)
    return added


def factors_of(linear: nn.Module) -> Factors | None:
    """Return the factors of a linear's adapter, if it has one and it is on."""
    adapter = linear._modules.get(CHILD)
    return adapter.factors if isinstance(adapter, LowRank) and adapter.is_on else None


def adapters(model: nn.Module) -> Iterator[LowRankModule]:
    """Return the adapters of a model, in module order."""
    return (module for module in model.modules() if isinstance(module, LowRankModule))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Turn all adapters off inside the context."""
    found = list(adapters(model))
    for adapter in found:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.is_on = True


def is_adapters(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return f".{CHILD}." in name


def first_values(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return a factor's initial values in float32: zeros for B, `drawn_values` for A."""
    return torch.zeros(shape) if name.endswith(".B") else drawn_values(name, shape, seed)


def drawn_values(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Draw float32 numbers of absolute value below 1 / sqrt(K), as PEFT draws A; K is the last size.

    They depend on the run's seed and the parameter's name alone.
    """
    digest = hashlib.sha256(f"{seed} causal_lm.{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[-1])


def target_names(model: PreTrainedModel, asked: str) -> tuple[str, ...]:
    """Return the last parts of the names of the linears to adapt, sorted.

    asked: comma-separated names, or ALL_LINEAR: every linear and the experts, without routers and
    the output projection. All experts of a layer are one target, named by their module.
    Raise ConfigError for a name that the model does not have, for a module that is no plain linear,
    and for an output projection that shares its weight with the input embedding.
    """
    kinds: dict[str, set[str]] = {}
    choosing, head = choosers(model), model.get_output_embeddings()
    for name, module in model.named_modules():
        kind = (
            "head" if module is head
            else "linear" if has_usual_experts(module)
            else "router" if module in choosing
            else "linear" if type(module) is nn.Linear
            else "other"
        )  # fmt: skip
        kinds.setdefault(_leaf(name), set()).add(kind)
    linears = {name for name, found in kinds.items() if found == {"linear"}}
    heads = {name for name, found in kinds.items() if found == {"head"}}
    allowed = linears if model.config.tie_word_embeddings else linears | heads
    names = linears if asked == ALL_LINEAR else {name.strip() for name in asked.split(",")}
    for name in sorted(names - allowed):
        rule = (
            "shares its weight with the input embedding, which has no adapter" if name in heads
            else "chooses experts, and stays as it is" if "router" in kinds.get(name, ())
            else "is not a plain linear of this model" if name and name in kinds
            else "is no module of this model"
        )  # fmt: skip
        raise ConfigError(
            f"--lora-target-modules={asked}: {name!r} {rule}. Choose from {', '.join(sorted(allowed))}."
        )
    return tuple(sorted(names))


def with_adapters(
    shapes: OperatorShapes, model: PreTrainedModel, adapter: AdapterShape | None, blocks: int
) -> OperatorShapes:
    """Return the operator shapes of a model, with the shapes of the products with A and B added."""
    if adapter is None:
        return shapes
    shared = row_parallel_linears(model) if blocks > 1 else set()
    linears, rank = adapted_linears(model, adapter), adapter.rank
    of_a = {(rank, m.in_features, False) for m in linears if m not in shared}
    of_row_a = {(rank, m.in_features, False) for m in linears if m in shared}
    of_b = {(m.out_features, rank, False) for m in linears}
    return replace(
        shapes,
        linear=tuple(sorted({*shapes.linear, *of_a, *of_b})),
        row_linear=tuple(sorted({*shapes.row_linear, *of_row_a})),
    )


def adapted_linears(model: nn.Module, adapter: AdapterShape) -> list[nn.Linear]:
    """Return the linears that are to get an adapter, of a model without adapters."""
    return [
        module
        for name, module in model.named_modules()
        if _leaf(name) in adapter.targets and isinstance(module, nn.Linear)
    ]


def adapter_size(model: nn.Module, adapter: AdapterShape) -> int:
    """Return the number of elements in all adapters of a model that has none yet."""
    linears = adapted_linears(model, adapter)
    size = adapter.rank * sum(m.in_features + m.out_features for m in linears)
    return size + sum(expert_adapter_size(m, adapter) for m in _adapted_experts(model, adapter))


def _adapted_experts(model: nn.Module, adapter: AdapterShape) -> list[Any]:
    named = [m for name, m in model.named_modules() if _leaf(name) in adapter.targets]
    return [m for m in named if has_usual_experts(m)]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
