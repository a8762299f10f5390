"""RMS norm by the contract's operators, as a module that Megatron's specification can name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from onpolicy.train.megatron.collectives import gather_rows
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
        round_last = self.config.family.norm_rounds_last
        return self.config.operators.rms_norm(x, self.weight, self.eps, round_last)


class JoinedHeadsNorm(AlignedNorm):
    """A norm of all `heads` of queries, or of keys, at once; every tensor-parallel rank has some of
    them."""

    def __init__(self, config: AlignedConfig, hidden_size: int, eps: float, heads: int):
        super().__init__(config, heads * hidden_size, eps)
        self.group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()

    def forward(self, x: Tensor) -> Tensor:
        """[T, 1, H / P, D] -> the same."""
        mine = slice(self.group.rank() * x.shape[2], (self.group.rank() + 1) * x.shape[2])
        whole = gather_rows(x.movedim(2, 0), self.group).movedim(0, 2)
        return super().forward(whole.flatten(2)).view(whole.shape)[:, :, mine]
