"""Low-rank adapters beside Megatron's linears, one for each linear of transformers that they hold.

`onpolicy/ops/linears.py` computes them, as in the rollout. Where tensor-parallel ranks shard N, each
has its rows of B and a partial gradient of A, which is whole on every rank; where they shard K, each
has its columns of A, and B is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from onpolicy.contract import AdapterShape
from onpolicy.models.lora.adapters import CHILD, ExpertLowRank, LowRankModule, Pair, is_adapters
from onpolicy.ops.linears import Factors, add_low_rank
from onpolicy.ops.row_parallel import WHOLE, RowParallel
from onpolicy.training.megatron.adapter_map import EXPERTS, JOINED
from onpolicy.training.megatron.parts import is_expert

if TYPE_CHECKING:
    from onpolicy.training.megatron.config import AlignedConfig


class PartLowRank(Pair):
    """The adapter of one linear of transformers, which is a part of a linear of Megatron."""

    def __init__(self, a: Tensor, b: Tensor, linear: Any, shape: AdapterShape):
        super().__init__(a, b)
        self.config: AlignedConfig = linear.config
        self.scale = shape.scale
        self.row_parallel: RowParallel = getattr(linear, "row_parallel", WHOLE)
        shares_rows = isinstance(linear, ColumnParallelLinear)
        self.group: dist.ProcessGroup | None = linear.tp_group if shares_rows else None
        """Ranks that shard N; None where N is not sharded."""
        _note_for_megatron(self, linear)

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """Add to the part's output: [..., K], [..., N] -> [..., N] in the output's dtype."""
        return add_low_rank(self.config.operators, x, out, self.factors, self.row_parallel)

    @property
    def factors(self) -> Factors:
        a: Tensor = self.A
        if self.group is not None:
            a = copy_to_tensor_model_parallel_region(a, self.group)
        return Factors(a, self.B, self.scale)


class JoinedLowRank(LowRankModule):
    """The adapters of one linear of Megatron, or of a rank's shard of it.

    `parts` names the linears of transformers that it holds, whose `sizes` rows alternate in groups. The
    parts that are targets have a pair of factors under their names.
    """

    def __init__(
        self, linear: Any, parts: Sequence[str], sizes: Sequence[int], shape: AdapterShape
    ):
        super().__init__(shape.scale)
        self.parts, self.sizes = tuple(parts), tuple(sizes)
        rows, columns = linear.weight.shape
        self.groups = rows // sum(sizes)
        like = linear.weight.detach()
        for part, size in zip(parts, sizes, strict=True):
            if part in shape.targets:
                a = like.new_zeros(shape.rank, columns)
                b = like.new_zeros(self.groups * size, shape.rank)
                self.add_module(part, PartLowRank(a, b, linear, shape))

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """Add to the linear's output: [..., K], [..., N] -> [..., N] in the output's dtype."""
        if not self.is_on:
            return out
        by_part = zip(self.parts, self.split(out, out.dim() - 1), strict=True)
        added = [self._added(name, x, its_out) for name, its_out in by_part]
        apart = [y.unflatten(-1, (self.groups, -1)) for y in added]
        return torch.cat(apart, dim=-1).flatten(-2)

    def split(self, x: Tensor, axis: int) -> list[Tensor]:
        """Split an axis of N by the linears of transformers."""
        apart = x.unflatten(axis, (self.groups, -1)).split(self.sizes, dim=axis + 1)
        return [part.flatten(axis, axis + 1) for part in apart]

    def _added(self, name: str, x: Tensor, out: Tensor) -> Tensor:
        """Add a part's adapter, if it has one, to the part's output."""
        part = self._modules.get(name)
        return out if part is None else part(x, out)


def _note_for_megatron(pair: Pair, linear: Any) -> None:
    """Mark the factors whose gradients Megatron sums over ranks, and counts in the gradient norm."""
    whole = [pair.A, pair.B]
    if isinstance(linear, ColumnParallelLinear):
        set_tensor_model_parallel_attributes(pair.B, True, 0, 1)
        return  # the gradient of A is summed where it is computed
    if isinstance(linear, RowParallelLinear):
        set_tensor_model_parallel_attributes(pair.A, True, 1, 1)
        whole = [pair.B]
    for factor in whole:  # each rank has the gradient of its own tokens
        factor.sequence_parallel = linear.config.sequence_parallel  # type: ignore[attr-defined]


def add_adapters(model: Any, shape: AdapterShape | None) -> None:
    """Add zero adapters to the target linears of a pipeline stage and freeze all other weights; without
    a shape, do nothing."""
    if shape is None:
        return
    model.requires_grad_(False)
    for name, linear in list(model.named_modules()):
        leaf = name.rpartition(".")[2]
        parts = JOINED.get(leaf, ())
        if set(shape.targets).intersection(parts):
            linear.lora = JoinedLowRank(linear, parts, _sizes(linear, parts), shape)
        elif leaf == EXPERTS and EXPERTS in shape.targets:
            linear.lora = _beside_experts(linear, shape)
    if model.pre_process:
        # Megatron recomputes layers, and sends gradients back through a pipeline, only if their
        # inputs require a gradient.
        model.embedding.register_forward_hook(_require_gradient)


def _beside_experts(experts: Any, shape: AdapterShape) -> ExpertLowRank:
    """Make the adapters of this rank's experts."""
    weights = experts.down.detach()
    count, hidden, inner = weights.shape
    adapter = ExpertLowRank(weights, (count, inner, hidden), shape)
    for factor in (adapter.gate_up.B, adapter.down.A):
        set_tensor_model_parallel_attributes(factor, True, 2, 1)
    for factor in adapter.parameters():
        factor.allreduce = experts.down.allreduce  # type: ignore[attr-defined]
    return adapter


def _require_gradient(embedding: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out.requires_grad_() if torch.is_grad_enabled() else out


def _sizes(linear: Any, parts: Sequence[str]) -> list[int]:
    """Return the rows of each part. In a linear_qkv, each group has its queries, its key, then its
    value."""
    if len(parts) == 3:
        config = linear.config
        queries = config.num_attention_heads // config.num_query_groups
        return [queries * config.kv_channels, config.kv_channels, config.kv_channels]
    return [len(linear.weight) // len(parts)] * len(parts)


def factors_of(output_layer: nn.Module) -> Factors | None:
    """Return the factors beside the output projection, if they exist and are switched on."""
    adapter = output_layer._modules.get(CHILD)
    if not isinstance(adapter, JoinedLowRank) or not adapter.is_on:
        return None
    part = adapter.get_submodule("lm_head")
    assert isinstance(part, PartLowRank)
    return part.factors


def sharded_adapters(model: nn.Module, key_of: Callable[[str], str]) -> dict[str, ShardedTensor]:
    """Return the checkpoint entries of a stage with adapters, by Megatron's names; `key_of` maps a name
    to the whole model's."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    replicas = {
        False: parallel_state.get_data_parallel_rank(with_context_parallel=True),
        True: parallel_state.get_expert_data_parallel_rank(),
    }
    experts = (
        0,
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    found = {}
    for name, factor in model.named_parameters():
        if is_adapters(name):
            is_shared = getattr(factor, "tensor_model_parallel", False)
            own = [(factor.partition_dim, rank, ranks)] if is_shared else []  # type: ignore[attr-defined]
            if is_expert(name):
                own.append(experts)
            found[name] = ShardedTensor.from_rank_offsets(
                key_of(name),
                factor,
                *own,
                replica_id=(0, 0 if is_shared else rank, replicas[is_expert(name)]),
                # The last rows may be padding.
                allow_shape_mismatch=".lm_head." in name and not name.endswith(".A"),
            )
    return found
