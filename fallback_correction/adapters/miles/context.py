"""Response tokens that a context-parallel rank of Miles or slime holds.

Sequence and geometric levels need all tokens of a sequence, and context parallelism shards them over
ranks. They are gathered and corrected as on one rank, with the same bits, and each rank takes back its
own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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


def zigzag_shard(
    total_lengths: list[int],
    response_lengths: list[int],
    rank: int,
    size: int,
    group: dist.ProcessGroup | None = None,
    *,
    padded_lengths: list[int] | None = None,
    device: torch.device | str = "cpu",
) -> ContextShard:
    """Return the shard of a rank: chunks `rank` and 2 size - 1 - rank of each sequence's 2 size.

    total_lengths: prompt and response. The log-probability of a token stands at the logits that predict
    it, one position earlier. padded_lengths: Miles' max_seq_lens, for qkv_format bshd. device: of the
    log-probabilities.
    """
    index, start = [], 0
    padded_lengths = padded_lengths or total_lengths
    for total, response, padded in zip(
        total_lengths, response_lengths, padded_lengths, strict=True
    ):
        chunk = -(-padded // (2 * size))
        first = total - response - 1
        for i in (rank, 2 * size - 1 - rank):
            held = range(max(i * chunk, first), min((i + 1) * chunk, total - 1))
            index += [start + position - first for position in held]
        start += response
    return ContextShard(
        index=torch.tensor(index, dtype=torch.int64, device=device), num_tokens=start, group=group
    )


class Shard(Protocol):
    """The part of `ContextShard` that the adapter needs; the batch is all responses laid end to end."""

    def gather(self, values: Tensor, /) -> Tensor:
        """Gather the values of all ranks in the batch's order: [n] -> [N]."""

    def take(self, full: Tensor, /) -> Tensor:
        """Return the part that this rank holds: [N] -> [n]."""
