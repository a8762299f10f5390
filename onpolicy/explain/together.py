"""Gathering of a call's tensors over Megatron's ranks, as one rank would have them
(`explain/megatron.py`).

Tensor parallelism shards columns, heads and, between linears, tokens; expert parallelism shards the
rows of experts, which return to the rank of their token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onpolicy.explain.taps.evidence import ATTENTION
from onpolicy.explain.taps.recorder import INPUTS
from onpolicy.explain.taps.scope import Together
from onpolicy.ops.row_parallel import WHOLE, RowParallel
from onpolicy.train.megatron.adapters import PartLowRank
from onpolicy.train.megatron.attention import AlignedAttention
from onpolicy.train.megatron.collectives import gather_rows
from onpolicy.train.megatron.modules import (
    AlignedColumnLinear,
    AlignedMLP,
    AlignedRowLinear,
    JoinedHeadsNorm,
)
from onpolicy.train.megatron.moe import AlignedExperts, Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The axes along which an operator's tensors are sharded over tensor-parallel ranks; None: not
    sharded."""

    given: int | None = None
    made: int | None = None

    held: int | None = None
    """The axis of the operator's weight."""

    pieces: int = 1
    """Adjacent parts of its result and weight, each of which is sharded: gate and up."""


ALL = Axes()

_WEIGHT, _WITH_BIAS = slice(1, 2), slice(1, 3)

_HEADS_FIRST = -3
"""The axis of heads in [1, H, T, D]."""

COLUMNS = {"linear": Axes(made=-1, held=0)}
GATE_AND_UP = {"linear": Axes(made=-1, held=0, pieces=2)}
ADDED = {**COLUMNS, "add_scaled": Axes(given=-1, made=-1)}
"""The axes of an adapter's addition to columns, by the rows of B on each rank; all have the product
with A."""

HEADS = {"rms_norm": Axes(given=-2, made=-2)}
SUM = {"row_parallel_linear": Axes(given=-1, held=1)}
OF_MODULES: tuple[tuple[type[nn.Module], dict[str, Axes]], ...] = (
    (AlignedRowLinear, SUM),
    (JoinedHeadsNorm, {"rms_norm": ALL}),
    (AlignedMLP, {"gated": Axes(given=-1, made=-1)}),
    (
        AlignedAttention,
        {
            "rotary": Axes(given=_HEADS_FIRST, made=_HEADS_FIRST),
            "attention": Axes(given=-2, made=-2),
        },
    ),
    (
        AlignedExperts,
        {"grouped_linear": Axes(made=-1, held=1, pieces=2), "gated": Axes(given=-1, made=-1)},
    ),
)


def axes_of(name: str, module: nn.Module) -> Mapping[str, Axes]:
    """Return the axes along which a Megatron module's operators are sharded, by operator."""
    leaf = name.rpartition(".")[2]
    if isinstance(module, PartLowRank):
        whole = {} if module.row_parallel is WHOLE else SUM
        return whole if module.group is None else ADDED
    if isinstance(module, AlignedColumnLinear):
        return GATE_AND_UP if leaf == "linear_fc1" else COLUMNS
    if leaf in ("q_layernorm", "k_layernorm") and not isinstance(module, JoinedHeadsNorm):
        return HEADS
    return next((axes for kind, axes in OF_MODULES if isinstance(module, kind)), {})


def makes_own_tokens(axes: Mapping[str, Axes]) -> bool:
    """Return whether under sequence parallelism each rank computes some tokens: outside
    column-parallel linears, before which tokens are gathered, and in sums."""
    return not axes or axes is SUM


class OverTensorRanks(Together):
    """A gatherer of the tensors of one module, or of the output projection, over tensor-parallel
    ranks."""

    def __init__(
        self,
        axes: Mapping[str, Axes],
        group: dist.ProcessGroup,
        shares_tokens: bool = False,
        columns: int | None = None,
    ):
        """Take the sharding. shares_tokens: whether unsharded tensors hold this rank's tokens
        alone; columns: the number of a result's columns without padding."""
        self.axes, self.group = axes, group
        self.shares_tokens, self.columns = shares_tokens, columns

    def given(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        with_rows = range(3) if name in ATTENTION else range(len(args))[INPUTS[name]]
        axis = self._of(name).given
        return tuple(
            self._whole(argument, axis) if number in with_rows else argument
            for number, argument in enumerate(args)
        )

    def made(self, name: str, out: Any) -> Any:
        if isinstance(out, tuple):
            return tuple(self.made(name, part) for part in out)
        axes = self._of(name)
        return self._whole(out, axes.made, axes.pieces)

    def held(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        axes = self._of(name)
        rows = [_alone(argument) for argument in args]
        if axes.held is None:
            return tuple(rows)
        for number in range(len(rows))[_WEIGHT if axes.held else _WITH_BIAS]:
            if rows[number] is not None:
                whole = self._together(rows[number], axes.held, axes.pieces)
                rows[number] = whole[: self.columns]
        return tuple(rows)

    def _of(self, name: str) -> Axes:
        return self.axes.get(name, ALL)

    def _whole(self, x: Tensor, axis: int | None, pieces: int = 1) -> Tensor:
        if axis is not None:
            return self._together(x, axis, pieces)[..., : self.columns]
        return gather_rows(x.detach(), self.group) if self.shares_tokens else x

    def _together(self, x: Tensor, axis: int, pieces: int) -> Tensor:
        parts = (part.movedim(axis, 0) for part in x.detach().chunk(pieces, axis))
        whole = torch.cat([gather_rows(part, self.group).movedim(0, axis) for part in parts], axis)
        if axis != _HEADS_FIRST:
            return whole.contiguous()
        # `by_row` finds tokens by these strides.
        return whole.transpose(-3, -2).contiguous().transpose(-3, -2)


class OverExpertRanks(OverTensorRanks):
    """A gatherer of experts over ranks: as if this rank had all experts, for its tokens alone."""

    def __init__(self, experts: AlignedExperts, axes: Mapping[str, Axes], chosen: Tensor):
        """Take `chosen`, int64 [T, k], the choices given to the module."""
        super().__init__(axes, experts.tensor_group)
        self.experts = experts.group
        self.count = len(experts.gate_up) * self.experts.size()
        self.chosen = chosen.reshape(-1).sort()[0]
        self.exchange = Exchange(chosen, len(experts.gate_up), self.experts)
        self.sorted = self.exchange.experts.sort(stable=True)[1]

    def _whole(self, x: Tensor, axis: int | None, pieces: int = 1) -> Tensor:
        x = super()._whole(x, axis, pieces)
        arrived = torch.empty_like(x)
        arrived[self.sorted] = x.detach()
        return self.exchange.back(arrived)

    def held(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        args = super().held(name, args)
        if name not in ("grouped_linear", "grouped_partial_linear"):
            return args
        rows, weight, _ = args
        numbers = torch.arange(self.count + 1, device=rows.device)
        offsets = torch.searchsorted(self.chosen, numbers)
        return rows, gather_rows(weight.detach(), self.experts), offsets


def experts_together(experts: AlignedExperts, axes: Mapping[str, Axes], chosen: Tensor) -> Together:
    """Return the gatherer for experts that get these choices."""
    if experts.group.size() == 1:
        return OverTensorRanks(axes, experts.tensor_group)
    return OverExpertRanks(experts, axes, chosen)


def _alone(argument: Any) -> Any:
    """Return an argument as it is where one rank has everything."""
    return RowParallel(argument.blocks) if isinstance(argument, RowParallel) else argument
