"""Context parallelism for sequences whose tokens are sharded over ranks.

Sequence and geometric levels need all tokens of a sequence. The tokens are gathered and corrected as on
one rank, with the same bits, and each rank takes back its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextShard:
    """The tokens of a batch that this rank of a context-parallel group holds."""

    index: Tensor
    """Index of each of them in the batch of all tokens, int64 [n]. Every token has one holder. In
    Megatron, rank i of c holds chunks i and 2c - 1 - i of each sequence's 2c."""

    num_tokens: int
    """Number of tokens N of the batch, over all ranks of the group."""

    group: dist.ProcessGroup | None = None
    """Process group; None: the default group."""

    def gather(self, values: Tensor) -> Tensor:
        """Gather all ranks' values in the batch's order: [n] -> [N], without gradient.

        float32, integers or bool; every value keeps its bits.
        """
        if values.dtype == torch.bool:
            return self.gather(values.int()).bool()
        full = values.detach().new_zeros(self.num_tokens)
        full[self.index] = values.detach()
        # Every token has one holder, so each sum has one nonzero term and is exact.
        holders = torch.bincount(self.index, minlength=self.num_tokens).to(values.device)
        dist.all_reduce(holders, group=self.group)
        if not (holders == 1).all():
            raise ValueError(
                f"index: {int((holders != 1).sum())} of num_tokens={self.num_tokens} tokens have no "
                "holder or several. The ranks' indices must be a partition of the batch."
            )
        bits = full.view(torch.int32) if full.dtype == torch.float32 else full
        dist.all_reduce(bits, group=self.group)
        return full

    def take(self, full: Tensor) -> Tensor:
        """Return this rank's part of [N]: [n]."""
        return full[self.index]
