"""Megatron's gradient buffers and optimizer, with the run's settings."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn

from onpolicy.config import TrainConfig
from onpolicy.ops import Operators
from onpolicy.train.gradient_norm import global_norm
from onpolicy.train.megatron.stages import config_of


def with_gradients(model: nn.Module, config: TrainConfig) -> DistributedDataParallel:
    """The model with float32 gradients, summed (not averaged) over data- and context-parallel ranks."""
    model_config = config_of(model)
    model_config.finalize_model_grads_func = finalize_model_grads
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.megatron.megatron_distributed_optimizer,
    )
    return DistributedDataParallel(model_config, buffers, model)


def make_optimizer(
    model: DistributedDataParallel, config: TrainConfig, dtype: torch.dtype
) -> MegatronOptimizer:
    """AdamW on float32 master weights; every step is given its learning rate."""
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
        use_distributed_optimizer=config.megatron.megatron_distributed_optimizer,
    )
    return get_megatron_optimizer(
        settings,
        [model],
        config_overrides={},  # none: decay norms and biases as the other engine does
        use_gloo_process_groups=torch.cuda.is_available(),
    )


def gradient_norm(optimizer: MegatronOptimizer, operators: Operators) -> float:
    """The norm of all prepared gradients of all ranks, as `ChainedOptimizer.get_grad_norm` has it."""
    shards: defaultdict[dist.ProcessGroup, list[Tensor]] = defaultdict(list)
    for part in optimizer.chained_optimizers:
        shards[part.get_grad_stats_parallel_group()] += part.get_main_grads_for_grad_norm()
    return math.hypot(*(global_norm(theirs, operators, group) for group, theirs in shards.items()))


def use_settings(optimizer: MegatronOptimizer, config: TrainConfig) -> None:
    """Set AdamW to this run's flags: loading a Megatron checkpoint restores the earlier run's."""
    trainer = config.trainer
    for group in optimizer.param_groups:
        group["betas"] = (trainer.adam_beta1, trainer.adam_beta2)
        group["eps"] = trainer.adam_eps
        group["weight_decay"] = trainer.weight_decay
        if config.operators.is_portable:
            group["fused"] = True  # why: `onpolicy/train/fsdp/optimizer.py`
