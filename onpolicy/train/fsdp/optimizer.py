"""AdamW on the sharded float32 master weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from onpolicy.config.groups import TrainerConfig
from onpolicy.ops import Operators
from onpolicy.train.blocks import run_in_blocks
from onpolicy.train.state import create_missing_moments


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: TrainerConfig, *, portable: bool = False
) -> torch.optim.AdamW:
    """Make AdamW with the run's settings; every step is given its learning rate.

    portable: use PyTorch's fused kernel, whose square root is correctly rounded. The other kernel uses
    MKL's, whose bits differ between AMD's and Intel's processors.
    """
    return torch.optim.AdamW(
        list(parameters),
        lr=0.0,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=portable or None,
    )


@torch.no_grad()
def take_step(optimizer: torch.optim.AdamW, operators: Operators, rate: float) -> None:
    """Step the optimizer at a learning rate, with the bits of `optimizer.step()`: on a CPU block by
    block, so that memory is read once."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    moved = [
        (parameter, group)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    if any(parameter.device.type != "cpu" for parameter, _ in moved):
        optimizer.step()
        return
    create_missing_moments(optimizer)
    work = []
    for parameter, group in moved:
        state = optimizer.state[parameter]
        tensors = [parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
        work.append((partial(_step_block, group, float(state["step"])), tensors))
    run_in_blocks(operators, work)
    for parameter, _ in moved:
        optimizer.state[parameter]["step"] += 1


def _step_block(
    group: dict[str, Any], step: float, weights: Tensor, grads: Tensor, mean: Tensor, square: Tensor
) -> None:
    """Run PyTorch's own AdamW step on one block, after `step` steps."""
    beta1, beta2 = group["betas"]
    adamw(
        [weights],
        [grads],
        [mean],
        [square],
        [],
        [torch.tensor(step)],
        foreach=False,
        fused=group["fused"],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def clip_gradients(
    gradients: Sequence[Tensor], limit: float, norm: float, operators: Operators
) -> None:
    """Scale this rank's gradients as `torch.nn.utils.clip_grads_with_norm_` does, to the same bits."""
    factor = limit / (torch.tensor(norm) + 1e-6)
    if not factor >= 1:  # a product with 1 changes nothing
        run_in_blocks(operators, [(lambda block: block.mul_(factor), [x]) for x in gradients])
