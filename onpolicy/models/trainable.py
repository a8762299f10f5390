"""The trained parameters of a model: exactly those that require a gradient."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from onpolicy.weights.digest import WeightDigest


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def frozen_digest(model: nn.Module) -> str:
    """Return the digest of this rank's part of the frozen parameters; "" if there are none."""
    digest, frozen = WeightDigest(), False
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            frozen, part = True, parameter.detach()
            digest.add(name, part.to_local() if isinstance(part, DTensor) else part)
    return digest.hexdigest() if frozen else ""
