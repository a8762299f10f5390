"""Context parallelism: sequences whose tokens are spread over ranks.

Sequence and geometric levels need all tokens of a sequence. They are gathered, corrected as on one
rank, with the same bits, and each rank takes back the tokens that it holds.
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
    """int64 [n]: where each of them stands in the batch of all tokens. Every token has one holder.
    Megatron's rank i of c, for one, holds chunks i and 2c - 1 - i of each sequence's 2c."""

    num_tokens: int
    """N: tokens of the batch, over all ranks of the group."""

    group: dist.ProcessGroup | None = None
    """None: the default group."""

    def gather(self, values: Tensor) -> Tensor:
        """Everybody's values in the batch's order: [n] -> [N], without gradient.

        float32, integers or bool; every value keeps its bits.
        """
        if values.dtype == torch.bool:
            return self.gather(values.int()).bool()
        full = values.detach().new_zeros(self.num_tokens)
        full[self.index] = values.detach()
        # Every token has one holder, so each sum has one term that is not 0.
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
        """The part of [N] that this rank holds: [n]."""
        return full[self.index]
