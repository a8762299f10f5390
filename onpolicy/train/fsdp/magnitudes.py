"""The norms that the magnitudes of adapted weights are divided by, taken of FSDP2's shards."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from onpolicy.models.adapters import LowRank, adapters_of_linears
from onpolicy.models.magnitude import row_norms
from onpolicy.models.policy import PolicyModel
from onpolicy.ops.low_rank import Factors


@torch.no_grad()
def take_norms(model: PolicyModel, dtype: torch.dtype, *, begins: bool = False) -> None:
    """Divide by the norms that the rows of W + s B A have now, as they are computed with in `dtype`;
    collective. `begins`: m becomes the norm too, so that it changes nothing."""
    for linear, adapter in adapters_of_linears(model):
        if adapter.magnitude is None:
            continue
        # FSDP2 shares the rows of W, B and m alike.
        norms = torch.empty_like(adapter.magnitude.m.detach())
        assert isinstance(norms, DTensor)
        norms.to_local().copy_(_own_norms(model, linear.weight, adapter, dtype))
        adapter.magnitude.norm.copy_(norms.full_tensor())
        if begins:
            adapter.magnitude.m.copy_(norms)


def _own_norms(model: PolicyModel, weight: Tensor, adapter: LowRank, dtype: torch.dtype) -> Tensor:
    """Those of this rank's rows."""
    a, b, w = (x.detach().to(dtype) for x in (adapter.A, adapter.B, weight))
    assert isinstance(a, DTensor) and isinstance(b, DTensor) and isinstance(w, DTensor)
    factors = Factors(a.full_tensor(), b.to_local(), adapter.scale)
    return row_norms(model.operators, w.to_local(), factors)
