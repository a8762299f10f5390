"""Exchanges of tensor rows between ranks, with gradients summed in the order of the ranks.

Megatron's own mappings name CUDA devices, and leave the order of a sum to the communication library.
These run on any device, and always give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.row_parallel import tree_sum

Way = Callable[[Tensor, dist.ProcessGroup], Tensor]


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather all ranks' rows in rank order: [T, ...] -> [ranks * T, ...]; T is equal on all ranks.

    Every rank computes different results from them, so gradients are summed over ranks.
    """
    return _pass(x, group, _gather, _sum)


def tree_sum_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows of the sum over ranks: [ranks * T, ...] -> [T, ...].

    T is equal on all ranks. The sum goes along the tree of a row-parallel linear
    (`ops/row_parallel.py`).
    """
    return _pass(x, group, _tree_sum, _gather)


def share_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather all ranks' rows in rank order: [T, ...] -> [ranks * T, ...]; T is equal on all ranks.

    Every rank computes the same results from them, so each takes back the gradient of its own rows.
    """
    return _pass(x, group, _gather, _own)


def own_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of rows that are equal on all ranks: [ranks * T, ...] -> [T, ...].

    Every rank gets the gradients of all rows.
    """
    return _pass(x, group, _own, _gather)


def exchange_rows(
    x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send rows to every rank and receive rows from every rank: [sum(send), ...] -> [sum(receive),
    ...].

    send[r] and receive[r] are the numbers of rows to and from rank r, in rank order.
    """
    there = partial(_exchange, send=send, receive=receive)
    return _pass(x, group, there, partial(_exchange, send=receive, receive=send))


def _pass(x: Tensor, group: dist.ProcessGroup, there: Way, back: Way) -> Tensor:
    return x if group.size() == 1 else _Passed.apply(x, group, there, back)


class _Passed(torch.autograd.Function):
    """An autograd function that moves rows one way, and their gradients by another way back."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup, there: Way, back: Way
    ) -> Tensor:
        ctx.group, ctx.back = group, back  # type: ignore[attr-defined]
        return there(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None  # type: ignore[attr-defined]


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _parts(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Return every rank's part for this rank, in rank order."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received.chunk(group.size())


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    first, *others = _parts(x, group)
    total = first.float()
    for part in others:
        total = total + part.float()
    return total.to(x.dtype)


def _tree_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tree_sum(_parts(x, group))


def _own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size())[group.rank()]


def _exchange(x: Tensor, group: dist.ProcessGroup, send: list[int], receive: list[int]) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out
