"""The learning rate schedule over the optimizer steps of a run."""

from __future__ import annotations

import math

from onpolicy.config.groups import TrainerConfig


def base_factor(step: int, config: TrainerConfig, total_steps: int) -> float:
    """Return the factor of --lr: linear warm-up to 1, then constant, or a linear or cosine
    decay to 0."""
    if step < config.lr_warmup_steps:
        return (step + 1) / config.lr_warmup_steps
    if config.lr_decay_style == "constant":
        return 1.0
    steps = max(total_steps - config.lr_warmup_steps, 1)
    progress = min((step - config.lr_warmup_steps) / steps, 1.0)
    if config.lr_decay_style == "linear":
        return 1.0 - progress
    return (1.0 + math.cos(math.pi * progress)) / 2
