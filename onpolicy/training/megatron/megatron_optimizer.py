"""Megatron's gradient buffers and optimizer, with the run's settings.

Megatron sums a rank's micro-batches in its buffers, and then the buffers of all ranks. Here ranks
exchange their buffers after every micro-batch, and each adds its part in the order of the packing
(`training/shares.py`), as a single rank does that computes every micro-batch. Gradients are therefore
added in one order for any number of ranks.

Where a model computes with rounded weights, the optimizer updates `Masters`, which checkpoints hold.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn

from onpolicy.config import TrainConfig
from onpolicy.ops import Operators
from onpolicy.training import distributed
from onpolicy.training.gradient_norm import global_norm
from onpolicy.training.megatron.collectives import gather_rows
from onpolicy.training.megatron.megatron_weights import (
    Place,
    global_parameters,
    unwrap,
    weight_map_of,
)
from onpolicy.training.megatron.parts import Part
from onpolicy.training.megatron.rank_layout import MegatronLayout
from onpolicy.training.megatron.schedule import config_of
from onpolicy.weights.rounding import is_rounded, round_weight

_BLOCK = 1 << 24
"""Number of elements that ranks exchange at once."""


def with_gradients(model: nn.Module, config: TrainConfig) -> DistributedDataParallel:
    """Wrap the model with float32 gradients, summed (not averaged) over data- and context-parallel
    ranks."""
    model_config = config_of(model)
    model_config.finalize_model_grads_func = finalize_model_grads
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True
    )
    return DistributedDataParallel(model_config, buffers, model)


def make_optimizer(
    model: DistributedDataParallel, config: TrainConfig, dtype: torch.dtype
) -> MegatronOptimizer:
    """Make AdamW on float32 master weights; every step is given its learning rate."""
    trainer = config.trainer
    settings = OptimizerConfig(
        lr=0.0,
        min_lr=0.0,
        adam_beta1=trainer.adam_beta1,
        adam_beta2=trainer.adam_beta2,
        adam_eps=trainer.adam_eps,
        weight_decay=trainer.weight_decay,
        clip_grad=trainer.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(
        settings,
        [model],
        config_overrides={},  # norms and biases are decayed as in the other engine
        use_gloo_process_groups=torch.cuda.is_available(),
    )


def use_settings(optimizer: MegatronOptimizer, config: TrainConfig) -> None:
    """Set AdamW to this run's flags, since loading a Megatron checkpoint restores the earlier run's."""
    trainer = config.trainer
    for group in optimizer.param_groups:
        group["betas"] = (trainer.adam_beta1, trainer.adam_beta2)
        group["eps"] = trainer.adam_eps
        group["weight_decay"] = trainer.weight_decay
        if config.operators.is_portable:
            group["fused"] = True  # see `onpolicy/training/fsdp/fsdp_optimizer.py`


def gradient_norm(optimizer: MegatronOptimizer, operators: Operators) -> float:
    """Return the norm of all prepared gradients of all ranks, defined as in
    `ChainedOptimizer.get_grad_norm`."""
    shards: defaultdict[dist.ProcessGroup, list[Tensor]] = defaultdict(list)
    for part in optimizer.chained_optimizers:
        shards[part.get_grad_stats_parallel_group()] += part.get_main_grads_for_grad_norm()
    return math.hypot(*(global_norm(theirs, operators, group) for group, theirs in shards.items()))


def orders_gradients(layout: MegatronLayout) -> bool:
    """Return whether buffers hold one micro-batch of one rank's samples at a time. A pipeline runs
    several backward passes at its end, and a rank's experts compute other ranks' tokens too."""
    return layout.pipeline_model_parallel_size == layout.expert_model_parallel_size == 1


class OrderedGradients:
    """Running sums of a model's gradient buffers, sharded over the ranks.

    It runs before Megatron's own sum over ranks, which has nothing left to round.
    """

    def __init__(self, model: DistributedDataParallel):
        self._buffers = [
            (buffer.grad_data, buffer.data_parallel_group)
            for buffer in model.buffers + model.expert_parallel_buffers
            if buffer.data_parallel_group.size() > 1
        ]
        self._blocks: list[_Block] = []
        config_of(model).finalize_model_grads_func = self._finish

    def start(self) -> None:
        """Begin an optimizer step; its buffers are zero."""
        self._blocks = [
            _Block(held, held.new_zeros(-(-len(held) // group.size())), group)
            for gradients, group in self._buffers
            for held in gradients.split(_BLOCK)
        ]

    def take(self) -> None:
        """Add the buffers of all ranks, which hold one micro-batch each, and clear them."""
        for block in self._blocks:
            block.take()

    def _finish(self, *args: Any, **kwargs: Any) -> None:
        """Put the sums back and run Megatron's reduction: every element is in one rank's buffer and 0
        in the others', so any sum of them is exact."""
        self.take()
        for block in self._blocks:
            block.put_back()
        self._blocks = []
        finalize_model_grads(*args, **kwargs)


class _Block(NamedTuple):
    """A block of a gradient buffer, and this rank's part of the sums over it."""

    held: Tensor
    sums: Tensor
    group: dist.ProcessGroup

    def take(self) -> None:
        ours = F.pad(self.held, (0, self.group.size() * len(self.sums) - len(self.held)))
        distributed.add_in_order(self.sums, ours, self.group)
        self.held.zero_()

    def put_back(self) -> None:
        first = self.group.rank() * len(self.sums)
        ours = self.held[first : first + len(self.sums)]
        ours.copy_(self.sums[: len(ours)])


class Masters:
    """The masters of a model's rounded weights. Make it after the optimizer, which starts from
    unrounded weights.

    As FSDP2's masters (`training/fsdp/fsdp_optimizer.py`), they are rounded once after each step, over
    whole tensors, which tensor-parallel ranks gather for that; pipeline stages and expert-parallel
    ranks hold whole tensors. A master has the dtype that is pushed; in bfloat16 Megatron's optimizer
    keeps its own float32 copy. Frozen weights, such as the base model of adapters, are rounded once and
    have no masters.
    """

    def __init__(self, model: nn.Module, weight_format: str, *, trained: bool):
        """Round the weights of `model`, if there is a format; `trained`: keep masters."""
        policy = unwrap(model)
        self._map, self._format, self._place = weight_map_of(policy), weight_format, Place.mine()
        shapes = self._map.shapes() if weight_format else {}
        self._shapes = {
            name: shape
            for name, shape in shapes.items()
            if is_rounded(name, torch.empty(shape, device="meta"))
        }
        named = global_parameters(policy)
        self._rounded = {
            name: parameter.detach()
            for name, parameter in named.items()
            if self._parts(name, self._place.tp_rank)
        }
        kept = [name for name in self._rounded if trained and named[name].requires_grad]
        self.beside = {name: torch.empty_like(named[name]) for name in kept}
        """Masters, by the global names of the parameters, in their shapes."""
        for name in self._rounded:
            self._round(name)

    def round(self) -> None:
        """Copy the parameters to the masters, and round the parameters; collective."""
        for name in self.beside:
            self._round(name)

    def _round(self, name: str) -> None:
        group, parameter = parallel_state.get_tensor_model_parallel_group(), self._rounded[name]
        if name in self.beside:
            self.beside[name].copy_(parameter)
        held = gather_rows(parameter, group).chunk(group.size())
        whole = {
            key: round_weight(tensor, self._format)
            for key, tensor in self._put_together(name, held).items()
        }
        for part in self._parts(name, self._place.tp_rank):
            parameter[part.target] = whole[part.name][part.source]

    def swap(self) -> None:
        """Swap masters and rounded weights."""
        for name, master in self.beside.items():
            rounded = self._rounded[name].clone()
            self._rounded[name].copy_(master)
            master.copy_(rounded)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the masters into the model's parameters within this context."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def _put_together(self, name: str, held: Sequence[Tensor]) -> dict[str, Tensor]:
        """Assemble a checkpoint's tensors from each tensor-parallel rank's shard of `name`."""
        whole: dict[str, Tensor] = {}
        for rank, parameter in enumerate(held):
            for part in self._parts(name, rank):
                empty = parameter.new_empty(self._shapes[part.name])
                whole.setdefault(part.name, empty)[part.source] = parameter[part.target]
        return whole

    def _parts(self, name: str, tp_rank: int) -> list[Part]:
        """Return a parameter's parts of tensors that are rounded."""
        parts = self._map.parts(name, tp_rank, self._place.ep_rank)
        return [part for part in parts if part.name in self._shapes]
