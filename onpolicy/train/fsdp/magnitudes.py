"""The norms that the magnitudes of adapted weights are divided by, taken of FSDP2's shards."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from onpolicy.models.adapters import adapters_of_linears
from onpolicy.models.expert_adapters import adapted_matrices
from onpolicy.models.magnitude import Magnitude, expert_norms, row_norms
from onpolicy.models.policy import PolicyModel
from onpolicy.ops.low_rank import Factors


@torch.no_grad()
def take_norms(model: PolicyModel, dtype: torch.dtype, *, begins: bool = False) -> None:
    """Divide by the norms that the rows of W + s B A have now, as they are computed with in `dtype`;
    collective. `begins`: m becomes the norm too, so that it changes nothing."""
    for magnitude, own in chain(_of_linears(model, dtype), _of_experts(model, dtype)):
        norms = torch.empty_like(magnitude.m.detach())
        assert isinstance(norms, DTensor)
        norms.to_local().copy_(own)
        magnitude.norm.copy_(norms.full_tensor())
        if begins:
            magnitude.m.copy_(norms)


def _of_linears(model: PolicyModel, dtype: torch.dtype) -> Iterator[tuple[Magnitude, Tensor]]:
    """Magnitudes, and the norms of the rows of this rank: FSDP2 shares those of W, B and m alike."""
    for linear, adapter in adapters_of_linears(model):
        if adapter.magnitude is not None:
            a, b, w = (_sharded(x, dtype) for x in (adapter.A, adapter.B, linear.weight))
            factors = Factors(a.full_tensor(), b.to_local(), adapter.scale)
            yield adapter.magnitude, row_norms(model.operators, w.to_local(), factors)


def _of_experts(model: PolicyModel, dtype: torch.dtype) -> Iterator[tuple[Magnitude, Tensor]]:
    """Each rank has whole experts."""
    for experts, weight, pair in adapted_matrices(model):
        if pair.magnitude is not None:
            a, b, w = (_sharded(x, dtype).to_local() for x in (pair.A, pair.B, weight))
            factors = Factors(a, b.flatten(1, -2), experts.lora.scale)
            norms = expert_norms(model.operators, experts.weight(w), factors)
            yield pair.magnitude, norms.view(b.shape[:-1])


def _sharded(parameter: Tensor, dtype: torch.dtype) -> DTensor:
    cast = parameter.detach().to(dtype)
    assert isinstance(cast, DTensor)
    return cast
