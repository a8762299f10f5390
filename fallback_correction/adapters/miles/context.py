"""The response tokens that a context-parallel rank of Miles or slime holds."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fallback_correction.context_parallel import ContextShard


class Shard(Protocol):
    """The part of `ContextShard` that the adapter needs; the batch is all responses laid end to end."""

    def gather(self, values: Tensor, /) -> Tensor:
        """Gather the values of all ranks in the batch's order: [n] -> [N]."""

    def take(self, full: Tensor, /) -> Tensor:
        """Return the part that this rank holds: [N] -> [n]."""


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
    """Return the shard of rank `rank` of `size`: chunks rank and 2 size - 1 - rank of each sequence's 2
    size.

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
