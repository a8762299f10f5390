"""An output projection whose rows, one per token of the vocabulary, are shared by ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VocabParallel:
    """Rank r of P holds rows r * n to (r + 1) * n of the weight; the last rows may be padding.

    Logits of some tokens are gathered before anything is summed over the vocabulary, so every
    degree gives the bits of one rank.
    """

    size: int
    """V: rows that stand for tokens; at most P * n."""

    group: dist.ProcessGroup | None = None
    """The tensor-parallel group; None: this process holds all rows."""

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    def gather(self, logits: Tensor) -> Tensor:
        """This rank's columns [M, n] to those of the whole vocabulary [M, V]; no autograd."""
        if self.ranks > 1:
            parts = logits.new_empty(self.ranks * logits.shape[0], logits.shape[1])
            dist.all_gather_into_tensor(parts, logits.contiguous(), group=self.group)
            logits = torch.cat(parts.chunk(self.ranks), dim=1)
        return logits[:, : self.size].contiguous()

    def take(self, logits: Tensor, columns: int) -> Tensor:
        """This rank's `columns` of [M, V], zero where they are padding: the inverse of `gather`."""
        if self.group is None:
            return logits
        padding = columns * self.ranks - self.size
        out: Tensor = F.pad(logits, (0, padding)).split(columns, dim=1)[self.group.rank()]
        return out
