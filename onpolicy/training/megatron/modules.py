"""Norms, linears, MLPs and attention of Megatron's layers, on the contract's operators.

Megatron's own rotary embedding moves to the current CUDA device, and its attention without Transformer
Engine supports neither packed sequences nor context parallelism. Ours rotates by Hugging Face's angles,
so that every kind of RoPE scaling works, and gathers keys and values where context-parallel ranks shard
a sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor, nn

from onpolicy.models.rounded_inputs import operators_of
from onpolicy.ops import Operators, ScoreRule
from onpolicy.ops.base import rotate
from onpolicy.ops.row_parallel import RowParallel, tree_sum
from onpolicy.training.megatron.collectives import gather_rows, tree_sum_rows
from onpolicy.training.megatron.config import AlignedConfig
from onpolicy.training.megatron.family import is_rotated
from onpolicy.training.megatron.megatron_adapters import JoinedLowRank
from onpolicy.training.megatron.megatron_batch import LocalTokens


class AlignedNorm(nn.Module):
    """An RMS norm of layers, and of the heads of queries and keys."""

    def __init__(self, config: AlignedConfig, hidden_size: int, eps: float, **_: Any):
        super().__init__()
        self.config, self.eps = config, eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism every rank has other tokens: Megatron sums the gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        round_last = self.config.family.norm_rounds_last
        return self.config.operators.rms_norm(x, self.weight, self.eps, round_last)


class JoinedHeadsNorm(AlignedNorm):
    """A norm over all `heads` of queries, or of keys, at once; tensor-parallel ranks shard the heads."""

    def __init__(self, config: AlignedConfig, hidden_size: int, eps: float, heads: int):
        super().__init__(config, heads * hidden_size, eps)
        self.group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise this rank's heads by the norm of all: [T, 1, H / P, D] -> the same shape."""
        mine = slice(self.group.rank() * x.shape[2], (self.group.rank() + 1) * x.shape[2])
        whole = gather_rows(x.movedim(2, 0), self.group).movedim(0, 2)
        return super().forward(whole.flatten(2)).view(whole.shape)[:, :, mine]


class AlignedColumnLinear(ColumnParallelLinear):
    """A linear with sharded output features; every rank computes its own."""

    config: AlignedConfig

    def __init__(self, *args: Any, stride: int = 1, **kwargs: Any):
        super().__init__(*args, stride=stride, **kwargs)
        # Megatron's initialisation would set these, and its gradient norm reads them.
        set_tensor_model_parallel_attributes(self.weight, True, 0, stride)
        self.lora: JoinedLowRank | None = None

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
        out = operators_of(self, self.config.operators).linear(input, weight, bias)
        return out if self.lora is None else self.lora(input, out)


class AlignedRowLinear(RowParallelLinear):
    """A linear with sharded input features; float32 partial sums of all ranks are added along a tree."""

    config: AlignedConfig

    def __init__(self, *args: Any, stride: int = 1, **kwargs: Any):
        super().__init__(*args, stride=stride, **kwargs)
        set_tensor_model_parallel_attributes(self.weight, True, 1, stride)
        self.row_parallel = row_parallel(self.config, self.tp_group)
        self.lora: JoinedLowRank | None = None

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        operators = operators_of(self, self.config.operators)
        out = operators.row_parallel_linear(input_, self.weight, self.bias, self.row_parallel)
        return out if self.lora is None else self.lora(input_, out), None


class WholeLinear(nn.Module):
    """A linear that every tensor-parallel rank holds whole, applied to the rank's tokens."""

    def __init__(self, config: AlignedConfig, input_size: int, output_size: int):
        super().__init__()
        self.config = config
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
        self.weight = nn.Parameter(weight)
        # Under sequence parallelism every rank has other tokens: Megatron sums these gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.lora: JoinedLowRank | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = operators_of(self, self.config.operators).linear(x, self.weight)
        return out if self.lora is None else self.lora(x, out)


LINEARS = (AlignedColumnLinear, AlignedRowLinear, WholeLinear)
"""Classes of the linears of a checkpoint, except its output projection and routers."""


class NormedRowLinear(AlignedRowLinear):
    """The last linear of a sublayer whose norm comes after it."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        eps = self.config.layernorm_epsilon
        self.post_layernorm = AlignedNorm(self.config, self.output_size, eps)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        return self.post_layernorm(super().forward(input_)[0]), None


def last_linear(config: AlignedConfig) -> type[AlignedRowLinear]:
    """Return the class of the last linear of attention and of a dense MLP."""
    return NormedRowLinear if config.family.norms_after else AlignedRowLinear


def row_parallel(config: AlignedConfig, group: dist.ProcessGroup) -> RowParallel:
    """Return how a row-parallel linear over `group` sums: into all tokens, or into this rank's tokens.

    For a group of one rank, which has all of K, the result can be pickled.
    """
    kind = ScatteredRowParallel if config.sequence_parallel else RowParallel
    return kind(config.row_parallel_blocks, group if group.size() > 1 else None)


@dataclass(frozen=True, slots=True)
class ScatteredRowParallel(RowParallel):
    """A row-parallel sum under sequence parallelism: the same sums, of which every rank keeps its
    tokens."""

    def sum(self, partials: Sequence[Tensor]) -> Tensor:
        """Sum over blocks and ranks: [T, ...] of all tokens -> [T / ranks, ...]."""
        mine = tree_sum(partials)
        return mine if self.group is None else tree_sum_rows(mine, self.group)


class AlignedMLP(MLP):
    """Two linears with `Operators.gated` between them, as in the rollout."""

    config: AlignedConfig

    def __init__(self, config: AlignedConfig, size: int | None = None):
        """Make an MLP of intermediate size `size`, by default the size of the model's dense layers."""
        sized = copy.copy(config)  # Megatron takes the second linear's size from here alone
        sized.ffn_hidden_size = size or config.ffn_hidden_size
        super().__init__(
            sized,
            MLPSubmodules(linear_fc1=AlignedColumnLinear, linear_fc2=last_linear(config)),
            ffn_hidden_size=sized.ffn_hidden_size,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )
        for module in self.modules():
            module.config = config  # the shared one, whose operators may be replaced

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Apply the MLP: [T, 1, H] -> the same shape; under sequence parallelism, this rank's tokens."""
        gate, up = self.linear_fc1(hidden_states)[0].chunk(2, dim=-1)
        hidden = self.config.operators.gated(self.config.activation, gate, up)
        return self.linear_fc2(hidden)[0], None


class WholeMLP(nn.Module):
    """An MLP that every tensor-parallel rank holds whole, applied to the rank's tokens."""

    def __init__(self, config: AlignedConfig, size: int):
        super().__init__()
        self.config = config
        self.linear_fc1 = WholeLinear(config, config.hidden_size, 2 * size)
        self.linear_fc2 = WholeLinear(config, size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """Apply the MLP: [T, 1, H] -> the same shape."""
        gate, up = self.linear_fc1(hidden_states).chunk(2, dim=-1)
        hidden = self.config.operators.gated(self.config.activation, gate, up)
        return self.linear_fc2(hidden), None


class AlignedAttention(nn.Module):
    """Megatron's core attention: from projected heads to weighted values."""

    def __init__(self, config: AlignedConfig, layer_number: int, *, pg_collection: Any, **_: Any):
        super().__init__()
        self.config = config
        self.window = config.windows[layer_number - 1]
        self.rotates = is_rotated(config.hf_config, layer_number - 1)
        self.context_group: dist.ProcessGroup = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: LocalTokens,
        **_: Any,
    ) -> Tensor:
        """Attend over this rank's rows: [T, H, D], [T, H_kv, D], [T, H_kv, D] -> [T, H * D]."""
        operators, local = self.config.operators, packed_seq_params
        assert local.angles is not None
        q, k = query, key
        if self.rotates:
            q, k = rotated(operators, q, k, *local.angles)
        k, v = gather_rows(torch.cat((k, value), -1), self.context_group).chunk(2, -1)
        scores = ScoreRule(query.shape[-1] ** -0.5, self.window)
        parts = zip(q.chunk(len(local.layouts)), local.layouts, strict=True)
        return torch.cat([operators.attention(x, k, v, one, scores) for x, one in parts]).flatten(1)


def rotated(
    operators: Operators, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys: [T, H, D], [T, H_kv, D], angles [1, T, D'] twice -> the first two,
    rotated.

    Cases that the operator does not support use transformers' code, as in the rollout
    (`models/rotary.py`).
    """
    q, k = (x.transpose(0, 1)[None] for x in (query, key))
    if cos.shape[-1] == q.shape[-1] and cos.dtype == q.dtype:
        q, k = operators.rotary(q, k, cos, sin)
    else:
        q, k = (_rotated_part(x, cos, sin) for x in (q, k))
    return q[0].transpose(0, 1), k[0].transpose(0, 1)


def _rotated_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first D' elements of each head (GLM-4-MoE), by angles in float32 (OLMo-2): [1, H, T,
    D]."""
    size = cos.shape[-1]
    return torch.cat((rotate(x[..., :size], cos, sin).to(x.dtype), x[..., size:]), -1)
