"""AdamW on the sharded float32 master weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from onpolicy.config.groups import TrainerConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW with the run's settings; every step is given its learning rate."""
    return torch.optim.AdamW(
        list(parameters),
        lr=0.0,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )
