"""The ranks of the trainer: processes that met at a store, or this process alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from onpolicy.system import rendezvous
from onpolicy.system.network import GLOO_INTERFACE, LOOPBACK_INTERFACE, is_loopback

T = TypeVar("T")

_data_group: dist.ProcessGroup | None = None

_TIMEOUT = timedelta(hours=2)
"""Timeout of collectives; ranks wait for other ranks that send weights to engines."""


def init_process_group() -> None:
    """Form a group of this process alone, unless it has joined one."""
    if not dist.is_initialized():
        _join(dist.HashStore(), rank=0, world_size=1)


def open_store(address: str) -> tuple[dist.TCPStore, int]:
    """Open the store at which the ranks meet, on an address of this host, and return it with
    its port."""
    return rendezvous.open_store(address, _TIMEOUT)


def join(address: str, port: int, *, rank: int, world_size: int) -> None:
    """Join the group of all ranks; each of them calls this."""
    if is_loopback(address):
        os.environ.setdefault(GLOO_INTERFACE, LOOPBACK_INTERFACE)
    store = dist.TCPStore(address, port, timeout=_TIMEOUT, wait_for_workers=False)
    _join(store, rank, world_size)


def _join(store: dist.Store, rank: int, world_size: int) -> None:
    """Initialise the default group: gloo on a CPU, NCCL on GPUs."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT
    )


def rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise the error of the first rank that fails within this context, on every rank and after all
    have left it. A rank that fails must still take part in every collective operation within."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if world_size() == 1:
            raise
        failure = error
    for each in gather(failure, None):
        if each is not None:
            raise each


def run_on_rank_zero(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 and return its result, or raise its error, on every rank."""
    found: T | None = None
    with failing_together():
        if rank() == 0:
            found = function()
    return gather(found, None)[0]  # type: ignore[return-value]


def device(kind: str) -> torch.device:
    """Return this rank's device of a kind: `cpu`, or its current GPU."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def own_group(members: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make a group of each of these lists of ranks, which keeps their order, and return the one with
    this rank; collective."""
    made: list[dist.ProcessGroup] = [
        dist.new_group([*ranks], timeout=_TIMEOUT, sort_ranks=False) for ranks in members
    ]
    return next(group for group, ranks in zip(made, members, strict=True) if rank() in ranks)


def use_data_group(group: dist.ProcessGroup) -> None:
    """Spread samples over the ranks of `group`; by default, over all ranks.

    Ranks outside it hold other parts of the same model and compute the same samples.
    """
    global _data_group
    _data_group = group


def data_group() -> dist.ProcessGroup | None:
    """Return the group of ranks that split the samples; None: all ranks."""
    return _data_group


def data_rank() -> int:
    """Return the index of this rank's share of the samples, below `data_size`."""
    return dist.get_rank(_data_group)


def data_size() -> int:
    return dist.get_world_size(_data_group)


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks of `group` (None: all ranks), in their order, on every rank.

    A single rank calls no collective: the library would run even that in a thread and wait for it.
    """
    values: list[T] = [value] * dist.get_world_size(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def gather_data(value: T) -> list[T]:
    """Return the values of all shares of the samples, in their order, on every rank."""
    return gather(value, _data_group)


def gather_by_number(ours: Mapping[int, T]) -> dict[int, T]:
    """Merge the ranks' values by sample number, in the order of the numbers in the rollout."""
    found = {number: value for each in gather_data(ours) for number, value in each.items()}
    return dict(sorted(found.items()))


def any_data(value: bool) -> bool:
    """Return whether `value` is true on any rank that holds samples; known on every rank."""
    return any(gather_data(value))


def gather_vectors(values: Tensor) -> Tensor:
    """Concatenate the vectors of all shares of the samples."""
    if data_size() == 1:
        return values
    return torch.cat(gather_data(values.cpu()))


def gather_micro_batches(ours: Sequence[T]) -> list[T]:
    """Return one value for every micro-batch of all ranks, in the order of the packing (`shares.py`).

    A single rank computes them in that order.
    """
    # Packing deals micro-batches to the ranks in turn: take the first of each, then the second.
    return [value for turn in zip(*gather_data(ours), strict=True) for value in turn]


def sum_micro_batches(ours: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum metrics in float64 over the micro-batches of all ranks, by name, in the order of the packing.

    Fillers add zeros, which change no sum that begins with 0.0.
    """
    sums: dict[str, float] = {}
    for values in gather_micro_batches(list(ours)):
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def count_over_data(counts: Mapping[str, int], on: torch.device) -> dict[str, int]:
    """Sum counts over all shares of the samples, by name, on every rank."""
    if data_size() == 1:
        return {**counts}
    names = sorted(counts)
    values = torch.tensor([counts[name] for name in names], device=on)
    dist.all_reduce(values, group=_data_group)
    return dict(zip(names, values.tolist(), strict=True))


def add_in_order(total: Tensor, parts: Tensor, group: dist.ProcessGroup) -> None:
    """Add the contributions of all ranks of `group` to this rank's `total` [N], in rank order;
    collective.

    parts: [ranks * N], this rank's contribution to each of them.
    """
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    for part in received.chunk(group.size()):
        total += part
