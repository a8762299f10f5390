"""The norms that the magnitudes of adapted weights are divided by, taken of Megatron's parts of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor, nn

from onpolicy.models.adapters import CHILD
from onpolicy.models.low_rank import Pair
from onpolicy.models.magnitude import row_norms
from onpolicy.ops import Operators
from onpolicy.ops.low_rank import Factors
from onpolicy.train.megatron.adapters import JoinedLowRank
from onpolicy.train.megatron.collectives import gather_rows


@torch.no_grad()
def take_norms(model: nn.Module, operators: Operators, *, begins: bool = False) -> None:
    """Divide by the norms that the rows of W + s B A have now; collective. `begins`: m becomes the norm
    too, so that it changes nothing."""
    for linear, weight, adapter, pair in _pairs(model):
        if pair.magnitude is not None:
            norms = _norms(operators, linear, weight, Factors(pair.A, pair.B, adapter.scale))
            pair.magnitude.norm.copy_(norms)
            if begins:
                pair.magnitude.m.copy_(norms)


def _pairs(model: Any) -> Iterator[tuple[Any, Tensor, JoinedLowRank, Pair]]:
    """Linears of Megatron's, rows of them that are one of transformers', and the adapter of these."""
    for linear in model.modules():
        adapter = linear._modules.get(CHILD)
        if isinstance(adapter, JoinedLowRank):
            weights = adapter.split(linear.weight.detach(), 0)
            for name, weight in zip(adapter.parts, weights, strict=True):
                if isinstance(pair := adapter._modules.get(name), Pair):
                    yield linear, weight, adapter, pair


def _norms(operators: Operators, linear: Any, weight: Tensor, factors: Factors) -> Tensor:
    """Those of the rows of a rank, float32 [N]; of rows that ranks share by columns all have them."""
    if isinstance(linear, RowParallelLinear):
        weight, a = (_all_columns(x, linear.tp_group) for x in (weight, factors.a.detach()))
        factors = factors._replace(a=a)
    return row_norms(operators, weight, factors)


def _all_columns(x: Tensor, group: Any) -> Tensor:
    """[M, K / ranks] -> [M, K]"""
    return gather_rows(x.T, group).T.contiguous()
