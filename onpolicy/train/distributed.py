"""The ranks of the trainer: torchrun's processes, or this one alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_TIMEOUT = timedelta(hours=2)
"""Other ranks wait for rank 0 while it samples."""


def init_process_group() -> None:
    """Join torchrun's group, or form a group of one. Gloo on a CPU, NCCL on GPUs."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=_TIMEOUT)


def rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def local_world_size() -> int:
    """Ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def run_on_rank_zero(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 and return its result, or raise its error, on every rank."""
    outcome: list[T | Exception | None] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
            if world_size() == 1:
                raise
    if world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[1], Exception):
        raise outcome[1]
    return outcome[0]  # type: ignore[return-value]


def gather_objects(value: T) -> list[T]:
    """The values of all ranks, in their order, on every rank."""
    values: list[T] = [value] * world_size()
    dist.all_gather_object(values, value)
    return values
