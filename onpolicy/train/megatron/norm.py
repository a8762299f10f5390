"""RMS norm by the contract's operators, as a module that Megatron's specification can name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onpolicy.train.megatron.config import AlignedConfig


class AlignedNorm(nn.Module):
    """For layers, and for the heads of queries and keys."""

    def __init__(self, config: AlignedConfig, hidden_size: int, eps: float, **_: Any):
        super().__init__()
        self.config, self.eps = config, eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism every rank sees other tokens: Megatron adds up the gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        assert self.config.operators is not None
        return self.config.operators.rms_norm(x, self.weight, self.eps)
