"""Megatron's column- and row-parallel linears, computed by the contract's operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.row_parallel import RowParallel, tree_sum
from onpolicy.train.megatron.config import AlignedConfig
from onpolicy.train.megatron.norm import AlignedNorm


class AlignedColumnLinear(ColumnParallelLinear):
    """Rows of the weight are shared; every rank computes the output columns of its own."""

    config: AlignedConfig

    def __init__(self, *args: Any, stride: int = 1, **kwargs: Any):
        super().__init__(*args, stride=stride, **kwargs)
        # What Megatron's initialisation would note, and its gradient norm counts by.
        set_tensor_model_parallel_attributes(self.weight, True, 0, stride)

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup,
        **_: Any,
    ) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, tp_group)
        assert self.config.operators is not None
        return self.config.operators.linear(input, weight, bias)


class AlignedRowLinear(RowParallelLinear):
    """Columns of the weight are shared; float32 partials of all ranks are added along a tree."""

    config: AlignedConfig

    def __init__(self, *args: Any, stride: int = 1, **kwargs: Any):
        super().__init__(*args, stride=stride, **kwargs)
        set_tensor_model_parallel_attributes(self.weight, True, 1, stride)
        self.row_parallel = row_parallel(self.config, self.tp_group)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        assert self.config.operators is not None
        out = self.config.operators.row_parallel_linear(
            input_, self.weight, self.bias, self.row_parallel
        )
        return out, None


class WholeLinear(nn.Module):
    """A linear that every tensor-parallel rank holds whole, for the tokens that are there."""

    def __init__(self, config: AlignedConfig, input_size: int, output_size: int):
        super().__init__()
        self.config = config
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
        self.weight = nn.Parameter(weight)
        # Under sequence parallelism every rank sees other tokens: Megatron adds up the gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        assert self.config.operators is not None
        return self.config.operators.linear(x, self.weight)


class NormedRowLinear(AlignedRowLinear):
    """What ends a sublayer where the norm comes after it."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        eps = self.config.layernorm_epsilon
        self.post_layernorm = AlignedNorm(self.config, self.output_size, eps)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        return self.post_layernorm(super().forward(input_)[0]), None


def last_linear(config: AlignedConfig) -> type[AlignedRowLinear]:
    """What ends attention and a dense MLP."""
    return NormedRowLinear if config.family.norms_after else AlignedRowLinear


def row_parallel(config: AlignedConfig, group: dist.ProcessGroup) -> RowParallel:
    """How a row-parallel linear over `group` sums: into all tokens, or into this rank's of them.

    It can be sent to other processes where the group is of one rank, which has all of K.
    """
    kind = ScatteredRowParallel if config.sequence_parallel else RowParallel
    return kind(config.row_parallel_blocks, group if group.size() > 1 else None)


@dataclass(frozen=True, slots=True)
class ScatteredRowParallel(RowParallel):
    """Sequence parallelism: the same sums, and every rank takes its part of the tokens."""

    def sum(self, partials: Sequence[Tensor]) -> Tensor:
        """[T, ...] of all tokens -> [T / ranks, ...]."""
        mine = tree_sum(partials)
        return mine if self.group is None else _ScatteredSum.apply(mine, self.group)


class _ScatteredSum(torch.autograd.Function):
    """The tree over ranks, for this rank's rows alone."""

    @staticmethod
    def forward(ctx: FunctionCtx, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        received = torch.empty_like(partial, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, partial.contiguous(), group=group)
        return tree_sum(received.chunk(group.size()))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        group: dist.ProcessGroup = ctx.group  # type: ignore[attr-defined]
        out = grad.new_empty(group.size() * grad.shape[0], *grad.shape[1:])
        dist.all_gather_into_tensor(out, grad.contiguous(), group=group)
        return out, None
