"""A layer of experts instead of Megatron's, which applies routing weights before the last linear; and
the dispatch of tokens to the ranks of their experts.

`onpolicy/ops/mixture_of_experts.py` computes it, as in the rollout; Megatron places experts and
sums gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from onpolicy.models.expert_layers import ByOperators, Choice, RoutingReplay
from onpolicy.models.lora.adapters import ExpertLowRank
from onpolicy.models.rounded_inputs import InputRounding
from onpolicy.ops.mixture_of_experts import ExpertFactors, expert_outputs, gated_halves, mix_outputs
from onpolicy.ops.row_parallel import WHOLE, RowParallel
from onpolicy.training.megatron.collectives import exchange_rows, own_rows
from onpolicy.training.megatron.config import AlignedConfig
from onpolicy.training.megatron.family import shared_expert_size
from onpolicy.training.megatron.megatron_batch import LocalTokens
from onpolicy.training.megatron.modules import AlignedMLP, WholeLinear, WholeMLP, row_parallel

Compute = Callable[[Tensor, Tensor], Tensor]
"""(rows [S, H], int64 [S]: index of this rank's expert) -> float32 [S, ...]: the experts' outputs."""


class Exchange:
    """An exchange of rows with the ranks of their experts, there and back; collective.

    Row j of token t is its j-th choice. An expert's output for a row does not depend on other rows, so
    any rows may meet on a rank; outputs return unrounded, to be mixed in the router's order.
    """

    def __init__(self, experts: Tensor, per_rank: int, group: dist.ProcessGroup):
        """Prepare the exchange for experts int64 [T, k]; each rank of `group` holds `per_rank`
        experts."""
        self.group = group
        chosen, self.order = experts.reshape(-1).sort(stable=True)
        counts = torch.bincount(chosen // per_rank, minlength=group.size())
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        self._send, self._receive = counts.tolist(), arriving.tolist()
        self.experts = self.there(chosen % per_rank)
        """Index of this rank's expert for each row that arrives here, int64 [S]."""

    def there(self, rows: Tensor) -> Tensor:
        """Send this rank's rows, in `order`, to their experts' ranks: [T * k, ...] -> [S, ...]."""
        return exchange_rows(rows, self._send, self._receive, self.group)

    def back(self, rows: Tensor) -> Tensor:
        """Invert `there`."""
        return exchange_rows(rows, self._receive, self._send, self.group)


def all_to_all(
    x: Tensor, experts: Tensor, per_rank: int, compute: Compute, group: dist.ProcessGroup
) -> Tensor:
    """Send every row only to the rank of its expert, and return the outputs.

    x: [T, H]; experts: int64 [T, k], of which a rank holds `per_rank` -> float32 [T * k, ...].
    """
    exchange = Exchange(experts, per_rank, group)
    order = exchange.order
    rows = exchange.there(x[order // experts.shape[1]])
    results = exchange.back(compute(rows, exchange.experts))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    return results[back]


class SparseLayer(TransformerLayer):
    """Megatron's layer with routing replay.

    Every call gets the rollout's experts with its micro-batch, in each stage and in recomputation.
    """

    mlp: AlignedMoeLayer

    def forward(
        self, *args: Any, packed_seq_params: LocalTokens, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        hidden_states, context = self._forward_attention(
            *args, packed_seq_params=packed_seq_params, **kwargs
        )
        normed = self._forward_pre_mlp_layernorm(hidden_states)
        output = self.mlp(normed, packed_seq_params.routed_experts)
        return self._forward_post_mlp(output, hidden_states), context


class AlignedMoeLayer(MegatronModule):
    """Router and experts, with an optional shared expert.

    Each rank holds E / EP experts, and I / TP of their intermediate axis.
    """

    def __init__(self, config: AlignedConfig):
        super().__init__(config)
        self.router = _router(config)
        self.experts = AlignedExperts(config)
        self.shared_expert: nn.Module | None = None
        self.shared_gate: nn.Module | None = None
        family = config.family
        if family.shared_expert:
            kind = WholeMLP if family.shared_expert_is_whole else AlignedMLP
            self.shared_expert = kind(config, shared_expert_size(config.hf_config))
        if family.shared_expert_is_gated:
            self.shared_gate = WholeLinear(config, config.hidden_size, 1)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the layer's index from Megatron's number, which counts from 1."""
        self.layer = layer_number - 1

    def forward(self, hidden_states: Tensor, routed_experts: Tensor | None) -> tuple[Tensor, None]:
        """Apply the experts to this rank's tokens: [T, 1, H] -> the same shape. See `LocalTokens`."""
        x = hidden_states[:, 0]
        weights, chosen = self._route(x, routed_experts)
        group = parallel_state.get_tensor_model_parallel_group()
        if self.config.sequence_parallel:
            enter = partial(gather_from_sequence_parallel_region, group=group)
            chosen = enter(chosen)
        else:
            enter = partial(copy_to_tensor_model_parallel_region, group=group)
        mixed = self.experts(enter(x), enter(weights), chosen, weights).to(x.dtype)[:, None]
        return self._with_shared(mixed, hidden_states), None

    def _with_shared(self, mixed: Tensor, hidden_states: Tensor) -> Tensor:
        """Add the shared expert's output to the experts' output, all [T, 1, H]."""
        if self.shared_expert is None:
            return mixed
        shared: Tensor = self.shared_expert(hidden_states)[0]
        if self.shared_gate is not None:
            gate = self.config.operators.elementwise(torch.sigmoid, self.shared_gate(hidden_states))
            shared = gate * shared
        return mixed + shared

    def _route(self, x: Tensor, routed_experts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Choose experts, the router's or the rollout's: [T, H] -> weights [T, k], int64 [T, k]."""
        with ByOperators(self.config.operators, self._replay(routed_experts)):
            _, weights, chosen = self.router(x)
        return weights, chosen

    def _replay(self, routed_experts: Tensor | None) -> Choice | None:
        if routed_experts is None:
            return None
        config = self.config
        replay = RoutingReplay(routed_experts, config.moe_router_topk)
        return partial(replay.choose, self.layer, config.num_moe_experts)


def _router(config: AlignedConfig) -> Any:
    """Make transformers' router, whose code runs on the operators."""
    assert config.router is not None
    router: Any = config.router(config.hf_config)
    weight = nn.Parameter(torch.empty_like(router.weight, dtype=config.params_dtype))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    router.weight = weight
    return router


class AlignedExperts(nn.Module):
    """This rank's experts of a layer."""

    def __init__(self, config: AlignedConfig):
        super().__init__()
        assert config.num_moe_experts is not None and config.moe_ffn_hidden_size is not None
        self.config = config
        self.group = parallel_state.get_expert_model_parallel_group()
        self.tensor_group = parallel_state.get_expert_tensor_parallel_group()
        self.row_parallel = row_parallel(config, self.tensor_group)
        self.of_rows = RowParallel(config.row_parallel_blocks, self.row_parallel.group)
        """Row-parallel sums before the tokens are scattered."""
        self.rounding: InputRounding | None = None
        """Rounding of the inputs of their linears, if there is any."""
        count = config.num_moe_experts // self.group.size()
        inner = config.moe_ffn_hidden_size // self.tensor_group.size()
        dtype, hidden = config.params_dtype, config.hidden_size
        self.gate_up = nn.Parameter(torch.empty(count, 2, inner, hidden, dtype=dtype))
        self.down = nn.Parameter(torch.empty(count, hidden, inner, dtype=dtype))
        for parameter in (self.gate_up, self.down):
            set_tensor_model_parallel_attributes(parameter, True, 2, 1)
            # Megatron sums the gradients of experts over the ranks that hold the same ones.
            parameter.allreduce = self.group.size() == 1  # type: ignore[attr-defined]
        self.lora: ExpertLowRank | None = None

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor, own_weights: Tensor) -> Tensor:
        """Mix the experts' outputs: [T, H], [T, k], int64 [T, k] -> float32 [T, H].

        own_weights: weights of the output tokens, whose gradients are not summed over ranks. Under
        sequence parallelism the output has this rank's tokens.
        """
        results = self._results(x, chosen)
        if self._factors() is None:
            return mix_outputs(results, weights, self.row_parallel)
        *blocks, added = results
        mixed = mix_outputs(blocks, weights, self.row_parallel)
        if self.config.sequence_parallel:
            added = own_rows(added, self.tensor_group)
        return mixed + mix_outputs([added], own_weights, WHOLE)  # once, and not on every rank

    def _factors(self) -> ExpertFactors | None:
        if self.lora is None or not self.lora.is_on:
            return None
        gate_up, down = self.lora.factors
        # Each rank has its rows of B and its blocks, and so a partial gradient of the whole factor A.
        shared = partial(copy_to_tensor_model_parallel_region, group=self.tensor_group)
        return ExpertFactors(gate_up._replace(a=shared(gate_up.a)), down)

    def _results(self, x: Tensor, chosen: Tensor) -> Sequence[Tensor]:
        """Return the outputs of every token's k choices, float32 [T * k, H], for each of this rank's
        blocks and for adapters (`expert_outputs`)."""
        if self.group.size() == 1:
            rows = x[:, None].expand(-1, chosen.shape[1], -1).reshape(-1, x.shape[1])
            return self._outputs(rows, chosen.reshape(-1))
        return all_to_all(x, chosen, len(self.gate_up), self._stacked, self.group).unbind(1)

    def _outputs(self, rows: Tensor, experts: Tensor) -> list[Tensor]:
        """Compute [S, H], int64 [S] -> float32 [S, H] for each of this rank's blocks over I."""
        gate = gated_halves(self.config.operators, self.config.activation)
        if self.rounding is not None:
            rows, gate = self.rounding(rows), self.rounding.after(gate, self.row_parallel)
        return expert_outputs(
            self.config.operators,
            rows,
            experts,
            self.gate_up.flatten(1, 2),
            self.down,
            gate,
            self.of_rows,
            self._factors(),
        )

    def _stacked(self, rows: Tensor, experts: Tensor) -> Tensor:
        return torch.stack(self._outputs(rows, experts), dim=1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return Megatron's checkpoint entries, sharded by expert and by the intermediate axis."""
        layers = len(sharded_offsets)
        experts = (layers, self.group.rank(), self.group.size())
        inner = (layers + 2, self.tensor_group.rank(), self.tensor_group.size())
        replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                parameter,
                *sharded_offsets,
                experts,
                inner,
                replica_id=replica,
                prepend_axis_num=layers,
            )
            for name, parameter in self.named_parameters()
        }
