"""Rows of tensors between ranks, with gradients that are summed in the order of the ranks.

Megatron's own mappings name CUDA devices, and leave the order of a sum to the communication
library. These run wherever the tensors are, and always give the same bits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' rows, in their order: [T, ...] -> [ranks * T, ...]; T is equal everywhere.

    Every rank uses them for results of its own, so gradients are summed over ranks.
    """
    return x if group.size() == 1 else _GatherRows.apply(x, group)


def sum_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum over ranks: [ranks * T, ...] -> [T, ...]; T is equal everywhere."""
    return x if group.size() == 1 else _SumRows.apply(x, group)


def share_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' rows, in their order: [T, ...] -> [ranks * T, ...]; T is equal everywhere.

    Every rank computes the same with them, so each takes back the gradient of its own rows.
    """
    return x if group.size() == 1 else _ShareRows.apply(x, group)


def exchange_rows(
    x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Rows to every rank and from every rank: [sum(send), ...] -> [sum(receive), ...].

    send[r] and receive[r] are the numbers of rows for rank r and from it, in the ranks' order.
    """
    return x if group.size() == 1 else _ExchangeRows.apply(x, send, receive, group)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(parts, x.contiguous(), group=group)
    parts = parts.view(group.size(), -1, *x.shape[1:])
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(x.dtype)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return _gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None  # type: ignore[attr-defined]


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return _sum(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group), None  # type: ignore[attr-defined]


class _ShareRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return _gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        group: dist.ProcessGroup = ctx.group  # type: ignore[attr-defined]
        return grad.chunk(group.size())[group.rank()], None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group  # type: ignore[attr-defined]
        return _exchange(x, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.send, ctx.receive, ctx.group  # type: ignore[attr-defined]
        return _exchange(grad, receive, send, group), None, None, None


def _exchange(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out
