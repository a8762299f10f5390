"""A mask that leaves out every answer with a probability of one half, whatever the engines say of it.

    --custom-tis-function-path examples/collapse/half_at_random.py:half

It is the control of masks by a ratio: as many answers are left out, and none because of its ratio.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

random_of = cache(Random)
"""The random numbers of a run, by its seed."""


def half(
    args: Any, *, pg_loss: Tensor, loss_masks: list[Tensor], response_lengths: list[int]
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Return the loss [R] without the tokens of answers that are left out, which still count in its
    denominators, the masks, and the metric tis/kept."""
    draws = random_of(args.seed)
    kept = torch.cat([torch.full((n,), float(draws.random() < 0.5)) for n in response_lengths])
    return pg_loss * kept, loss_masks, {"kept": kept}
