"""Megatron's gradient buffers, optimizer and learning-rate schedule, with the run's settings."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from fallback_correction.length_decay import HasParamGroups, LengthDecay, LengthDecaySchedule
from onpolicy.config import TrainConfig
from onpolicy.train.megatron.stages import config_of
from onpolicy.train.optimizer import rate_factor


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
    """AdamW on float32 master weights."""
    trainer = config.trainer
    settings = OptimizerConfig(
        lr=trainer.lr,
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


def use_settings(optimizer: MegatronOptimizer, config: TrainConfig) -> None:
    """AdamW's of this run; Megatron's checkpoints bring along those that they were made with."""
    trainer = config.trainer
    for group in optimizer.param_groups:
        group["betas"] = (trainer.adam_beta1, trainer.adam_beta2)
        group["eps"] = trainer.adam_eps


def make_schedule(optimizer: HasParamGroups, config: TrainConfig) -> Schedule:
    """Megatron's, with the rates of the other engine; length decay on top if asked for."""
    base = BaseSchedule(optimizer, config)
    if config.trainer.lr_schedule != "length-decay":
        return base
    return LengthDecaySchedule(base, optimizer, LengthDecay(config.trainer.length_decay))


class BaseSchedule(OptimizerParamScheduler):
    """Of the learning rate over the run's optimizer steps; a resumed run goes by its own flags."""

    def __init__(self, optimizer: HasParamGroups, config: TrainConfig):
        self.trainer = trainer = config.trainer
        self.total_steps = config.rollout.num_rollout * config.steps_per_rollout
        super().__init__(
            optimizer,
            init_lr=0.0,
            max_lr=trainer.lr,
            min_lr=0.0,
            lr_warmup_steps=0,
            lr_decay_steps=self.total_steps,
            lr_decay_style=trainer.lr_decay_style,
            start_wd=trainer.weight_decay,
            end_wd=trainer.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """The rate of the step to come; Megatron's warm-up would begin at 0, and end a step later."""
        return self.trainer.lr * rate_factor(self.num_steps, self.trainer, self.total_steps)

    def step(self, increment: int = 1) -> None:
        """Go on by some optimizer steps."""
        super().step(increment)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Megatron's adds a checkpoint's steps to those it has taken."""
        self.num_steps = 0
        super().load_state_dict(state_dict)


Schedule = BaseSchedule | LengthDecaySchedule
