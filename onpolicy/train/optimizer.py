"""AdamW on the sharded float32 master weights, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fallback_correction.length_decay import LengthDecay, LengthDecaySchedule
from onpolicy.config import TrainConfig
from onpolicy.config.groups import TrainerConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW with the run's settings."""
    return torch.optim.AdamW(
        list(parameters),
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )


def make_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig) -> Schedule:
    """The learning rate over the run's optimizer steps: base schedule, length decay if asked for."""
    total_steps = config.rollout.num_rollout * config.steps_per_rollout
    base = BaseSchedule(optimizer, lambda step: rate_factor(step, config.trainer, total_steps))
    if config.trainer.lr_schedule != "length-decay":
        return base
    return LengthDecaySchedule(base, optimizer, LengthDecay(config.trainer.length_decay))


class BaseSchedule(LambdaLR):
    """A rate that depends on the number of optimizer steps alone, so that is all it saves."""

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


Schedule = BaseSchedule | LengthDecaySchedule


def rate_factor(step: int, config: TrainerConfig, total_steps: int) -> float:
    """Share of --lr: linear warm-up to the peak, then constant, or a linear or cosine way down to 0."""
    if step < config.lr_warmup_steps:
        return (step + 1) / config.lr_warmup_steps
    if config.lr_decay_style == "constant":
        return 1.0
    steps = max(total_steps - config.lr_warmup_steps, 1)
    progress = min((step - config.lr_warmup_steps) / steps, 1.0)
    if config.lr_decay_style == "linear":
        return 1.0 - progress
    return (1.0 + math.cos(math.pi * progress)) / 2
