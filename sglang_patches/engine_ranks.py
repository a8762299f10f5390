"""Tensor-parallel ranks of this engine: their sums, and their joint report.

A sum over a K that ranks share is an all-reduce of rounded parts in stock SGLang, so its bits
depend on the number of ranks. `RowParallel` makes it a tree of blocks whose number the contract
fixes; see onpolicy/ops/row_parallel.py. Each rank holds other shards and checks them itself, but
only rank 0 answers the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from onpolicy.contract import NumericsContract
from onpolicy.ops.row_parallel import RowParallel


def row_parallel(contract: NumericsContract) -> RowParallel:
    """Return how this engine's ranks share the blocks of a sum; needs SGLang's groups."""
    group = _group()
    return RowParallel(
        contract.row_parallel_blocks, group.device_group if group.world_size > 1 else None
    )


def num_ranks() -> int:
    """Return the tensor-parallel degree."""
    return int(_group().world_size)


def rank() -> int:
    """Return this process's rank in the tensor-parallel group."""
    return int(_group().rank_in_group)


def wait_for_all_ranks() -> None:
    """Wait for all ranks. Collective."""
    group = _group()
    if group.world_size > 1:
        dist.barrier(group.cpu_group)


def summed(part: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' parts, as stock SGLang adds them. Collective."""
    own = part.clone()  # SGLang may write over what it is given
    total: torch.Tensor = _group().all_reduce(own)
    return total


def shard(tensor: torch.Tensor, like: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the shard of a whole tensor that a rank's parameter `like` holds.

    An axis of another size is sharded equally, and the last shards may be padded (a vocabulary).
    """
    for axis, (whole, mine) in enumerate(zip(tensor.shape, like.shape, strict=True)):
        if whole != mine:
            start = min(rank * mine, whole)
            tensor = tensor.narrow(axis, start, min(mine, whole - start))
    return tensor


def gathered(part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a copy of the whole tensor of which each rank's parameter holds a shard. Collective."""
    group, whole = _group(), part.clone(memory_format=torch.contiguous_format)
    for axis, size in enumerate(shape):
        if part.shape[axis] != size and group.world_size > 1:
            parts = whole.new_empty(group.world_size * len(whole), *whole.shape[1:])
            dist.all_gather_into_tensor(parts, whole, group=group.device_group)
            whole = torch.cat(parts.chunk(group.world_size), axis)
    return whole[tuple(map(slice, shape))].contiguous()


def own_part(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return this rank's `size` columns of [T, columns], if `x` has the columns of all ranks."""
    group = _group()
    if group.world_size == 1 or x.shape[-1] != size * group.world_size:
        return x
    return x.chunk(group.world_size, dim=-1)[rank()]


def report_of_all_ranks(report: dict[str, Any]) -> dict[str, Any]:
    """Return `report`, or a text, which the trainer refuses, where ranks differ. Collective."""
    group = _group()
    reports: list[dict[str, Any]] = [{}] * group.world_size
    dist.all_gather_object(reports, report, group=group.cpu_group)
    agreed_report: dict[str, Any] = agreed(reports)
    return agreed_report


def agreed(values: Sequence[Any]) -> Any:
    """Return the common value of `values`, key by key; if they differ, a text with all."""
    first = values[0]
    if all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: agreed([value[key] for value in values]) for key in first}
    return first if all(value == first for value in values) else f"ranks differ: {list(values)}"


def _group() -> Any:
    from sglang.srt.distributed import get_tp_group

    return get_tp_group()
