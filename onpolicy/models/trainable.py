"""Which parameters of a model are trained: those that ask for a gradient, and nobody else decides it."""

from __future__ import annotations

from torch import nn


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trained ones, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
