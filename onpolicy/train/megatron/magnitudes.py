"""The norms that the magnitudes of adapted weights are divided by, taken of Megatron's parts of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor, nn

from onpolicy.models.adapters import CHILD
from onpolicy.models.low_rank import Pair
from onpolicy.models.magnitude import Magnitude, expert_norms, row_norms
from onpolicy.ops import Operators
from onpolicy.ops.low_rank import Factors
from onpolicy.train.megatron.adapters import JoinedLowRank
from onpolicy.train.megatron.collectives import gather_rows
from onpolicy.train.megatron.moe import AlignedExperts


@torch.no_grad()
def take_norms(model: nn.Module, operators: Operators, *, begins: bool = False) -> None:
    """Divide by the norms that the rows of W + s B A have now; collective. `begins`: m becomes the norm
    too, so that it changes nothing."""
    for magnitude, norms in chain(_of_linears(model, operators), _of_experts(model, operators)):
        magnitude.norm.copy_(norms)
        if begins:
            magnitude.m.copy_(norms)


def _of_linears(model: nn.Module, operators: Operators) -> Iterator[tuple[Magnitude, Tensor]]:
    """Magnitudes, and the norms of the rows of this rank; of rows that ranks share by columns all have
    them."""
    for linear, weight, adapter, pair in _pairs(model):
        if pair.magnitude is not None:
            a: Tensor = pair.A
            if isinstance(linear, RowParallelLinear):
                weight, a = (_all_columns(x, linear.tp_group) for x in (weight, a))
            yield pair.magnitude, row_norms(operators, weight, Factors(a, pair.B, adapter.scale))


def _pairs(model: Any) -> Iterator[tuple[Any, Tensor, JoinedLowRank, Pair]]:
    """Linears of Megatron's, rows of them that are one of transformers', and the adapter of these."""
    for linear in model.modules():
        adapter = linear._modules.get(CHILD)
        if isinstance(adapter, JoinedLowRank):
            weights = adapter.split(linear.weight.detach(), 0)
            for name, weight in zip(adapter.parts, weights, strict=True):
                if isinstance(pair := adapter._modules.get(name), Pair):
                    yield linear, weight, adapter, pair


def _of_experts(model: nn.Module, operators: Operators) -> Iterator[tuple[Magnitude, Tensor]]:
    """Those of the experts of this rank; ranks share the columns of `down`."""
    for experts in model.modules():
        if not isinstance(experts, AlignedExperts) or experts.lora is None:
            continue
        for pair, weight in (
            (experts.lora.gate_up, experts.gate_up),
            (experts.lora.down, experts.down),
        ):
            if pair.magnitude is not None:
                a, b, w = pair.A.detach(), pair.B.flatten(1, -2), weight.flatten(1, -2)
                if weight is experts.down:
                    w, a = (_all_columns(x, experts.tensor_group) for x in (w, a))
                norms = expert_norms(operators, w, Factors(a, b, experts.lora.scale))
                yield pair.magnitude, norms.view_as(pair.magnitude.norm)


def _all_columns(x: Tensor, group: Any) -> Tensor:
    """[..., K / ranks] -> [..., K]"""
    return gather_rows(x.movedim(-1, 0), group).movedim(0, -1).contiguous()
