"""Replicas of an FSDP2 model (HSDP): neighbouring ranks share one, and all replicas have the same bits.

A shard is cut into as many parts as there are replicas. Each rank adds all ranks' gradients of one part
in the order of a single rank, and after the last micro-batch the replicas exchange these sums. Weights
are not exchanged, since equal sums give equal steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onpolicy.errors import TrainingError
from onpolicy.training import distributed


class Replicas:
    """The groups of ranks, which all models of a trainer share; every method is collective."""

    def __init__(self, shard_ranks: int, device: str):
        """Make the groups: of `shard_ranks` neighbours, and of the ranks that hold the same shard."""
        size = distributed.world_size()
        self.shard_ranks, self._count = shard_ranks, size // shard_ranks
        self._index = distributed.rank() // shard_ranks
        firsts = range(0, size, shard_ranks)
        neighbours = [range(first, first + shard_ranks) for first in firsts]
        same = [range(first, size, shard_ranks) for first in range(shard_ranks)]
        self.mesh = DeviceMesh.from_group(distributed.own_group(neighbours), device)
        """This rank's replica."""
        self._same = distributed.own_group(same)
        self._by_shard = distributed.own_group([[*chain(*same)]])

    @staticmethod
    def of(shard_ranks: int, device: str) -> Replicas | None:
        """Return the replicas, each on so many ranks; None for a single one, as for 0."""
        alone = shard_ranks in (0, distributed.world_size())
        return None if alone else Replicas(shard_ranks, device)

    def add_in_order(self, total: Tensor, parts: Tensor) -> None:
        """Add the contributions of all ranks to this replica's part of `total` [N], in rank order.

        parts: [shard_ranks * N], this rank's contribution to each shard.
        """
        split = total.tensor_split(self._count)
        mine, sizes = split[self._index], [len(part) for part in split]
        shape = self.shard_ranks, self._count, len(mine)
        received = parts.new_empty(shape).flatten()
        counts = [len(mine)] * (self.shard_ranks * self._count)
        dist.all_to_all_single(
            received, parts, counts, sizes * self.shard_ranks, group=self._by_shard
        )
        for part in chain(*received.view(shape).unbind(1)):
            mine += part

    def add(self, total: Tensor) -> None:
        """Set `total` to its sum over the replicas."""
        keep_for_stream(total)
        dist.all_reduce(total, group=self._same)

    def require_equal(self, gradients: Sequence[Tensor]) -> None:
        """Raise TrainingError, on every rank, if another replica has other bits of this rank's float32
        shards."""
        sums = [x.view(torch.int32).sum() for x in gradients]
        found = distributed.gather(int(torch.stack(sums).sum()) if sums else 0, None)
        wrong = [r for r, each in enumerate(found) if each != found[r % self.shard_ranks]]
        if wrong:
            raise TrainingError(
                f"ranks={wrong}: their gradients differ from those of the first "
                f"--fsdp-shard-ranks={self.shard_ranks} ranks, so no optimizer step was taken. "
                "Look for a faulty device or network, and resume from the last checkpoint with --load."
            )


def keep_for_stream(tensor: Tensor) -> None:
    """Keep a GPU's memory until the current stream has used it, whichever stream allocated it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream())
