"""AdamW on the sharded float32 master weights, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

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


def make_schedule(
    optimizer: torch.optim.Optimizer, config: TrainerConfig, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up to the peak, then constant, or a linear or cosine way down to 0."""

    def factor(step: int) -> float:
        if step < config.lr_warmup_steps:
            return (step + 1) / config.lr_warmup_steps
        if config.lr_decay_style == "constant":
            return 1.0
        steps = max(total_steps - config.lr_warmup_steps, 1)
        progress = min((step - config.lr_warmup_steps) / steps, 1.0)
        if config.lr_decay_style == "linear":
            return 1.0 - progress
        return (1.0 + math.cos(math.pi * progress)) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
