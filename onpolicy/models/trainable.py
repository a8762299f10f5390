"""Which parameters of a model are trained: those that ask for a gradient, and nobody else decides it."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from onpolicy.weights.digest import WeightDigest


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trained ones, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def frozen_digest(model: nn.Module) -> str:
    """The digest of this rank's part of those that are not trained; "" if it has none."""
    digest, frozen = WeightDigest(), False
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            frozen, part = True, parameter.detach()
            digest.add(name, part.to_local() if isinstance(part, DTensor) else part)
    return digest.hexdigest() if frozen else ""
