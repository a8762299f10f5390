"""Expert parallelism: rows travel to the ranks of their experts, and what these make of them back.

Row j of token t is its j-th choice. An expert computes a row as if it were alone, so it does not
matter which rows meet on its rank; results come home unrounded, to be mixed in the router's order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onpolicy.train.megatron.collectives import exchange_rows, gather_rows, sum_rows

Compute = Callable[[Tensor, Tensor], Tensor]
"""(rows [S, H], int64 [S]: which of this rank's experts) -> float32 [S, ...]: the experts' results."""

Dispatch = Callable[[Tensor, Tensor, int, Compute, dist.ProcessGroup], Tensor]
"""(x [T, H], experts int64 [T, k], experts per rank, compute, group) -> float32 [T * k, ...]."""


class Exchange:
    """The way of rows to the ranks of their experts, sorted by these, and back; collective."""

    def __init__(self, experts: Tensor, per_rank: int, group: dist.ProcessGroup):
        """experts: int64 [T, k]; `per_rank` of them are on each rank of `group`."""
        self.group = group
        chosen, self.order = experts.reshape(-1).sort(stable=True)
        counts = torch.bincount(chosen // per_rank, minlength=group.size())
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        self._send, self._receive = counts.tolist(), arriving.tolist()
        self.experts = self.there(chosen % per_rank)
        """int64 [S]: of the rows that arrive here, which of this rank's experts each wants."""

    def there(self, rows: Tensor) -> Tensor:
        """Send this rank's rows, in `order`, to the ranks that compute them: [T * k, ...] -> [S,
        ...]."""
        return exchange_rows(rows, self._send, self._receive, self.group)

    def back(self, rows: Tensor) -> Tensor:
        """The inverse of `there`."""
        return exchange_rows(rows, self._receive, self._send, self.group)


def all_to_all(
    x: Tensor, experts: Tensor, per_rank: int, compute: Compute, group: dist.ProcessGroup
) -> Tensor:
    """Every row goes to the rank of its expert, and to no other."""
    exchange = Exchange(experts, per_rank, group)
    order = exchange.order
    rows = exchange.there(x[order // experts.shape[1]])
    results = exchange.back(compute(rows, exchange.experts))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    return results[back]


def all_gather(
    x: Tensor, experts: Tensor, per_rank: int, compute: Compute, group: dist.ProcessGroup
) -> Tensor:
    """Every rank gets all rows, and computes those of its own experts."""
    tokens, k = experts.shape
    longest = torch.tensor([tokens], device=x.device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    missing = int(longest) - tokens
    first = group.rank() * per_rank
    everything = gather_rows(F.pad(x, (0, 0, 0, missing)), group)
    chosen = gather_rows(F.pad(experts, (0, 0, 0, missing), value=-1), group).reshape(-1) - first
    mine = ((chosen >= 0) & (chosen < per_rank)).nonzero()[:, 0]
    results = compute(everything[mine // k], chosen[mine])
    # Every row has one expert, so each sum over ranks has one term that is not 0.
    spread = results.new_zeros(len(chosen), *results.shape[1:]).index_copy(0, mine, results)
    return sum_rows(spread, group)[: tokens * k]


DISPATCH: dict[str, Dispatch] = {"alltoall": all_to_all, "allgather": all_gather}
