"""Sums of gradients over all micro-batches and ranks, in one order for any number of ranks.

FSDP2 adds the ranks' gradients of one micro-batch each, in the communication library's order, and adds
that sum to the earlier ones. Additions round, so the bits depend on the number of ranks. Here a rank
adds the contributions to its shard in the order of the packing (`train/shares.py`), one by one, as a
single rank does that computes every micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from onpolicy.train import distributed

NOTHING = -0.0
"""Neutral element of addition; 0.0 would turn -0.0 into 0.0."""


@dataclass(slots=True)
class Turn:
    """The current micro-batch of a rank, and the sums of the micro-batches before it."""

    is_filler: bool = False

    sums: dict[object, Tensor] = field(default_factory=dict)
    """Sums of this optimizer step, by reduce-scatter; they share the gradients' memory and are cleared
    with them."""


def sum_gradients(model: nn.Module, *, in_order: bool) -> Turn:
    """Make FSDP2 sum the ranks' gradients instead of averaging them: in the order of micro-batches, or
    in the communication library's own.

    The returned `Turn` must be set before every backward pass, on every rank.
    """
    turn = Turn()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A mean over three ranks would round. Unless the sum is forced, a factor of 1 becomes
            # a premultiplied sum, which gloo lacks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if in_order:
                module.set_custom_reduce_scatter(OrderedReduceScatter(turn))
    return turn


class OrderedReduceScatter(ReduceScatter):
    """A reduce-scatter of the gradients of one `fully_shard`ed module, over more than one rank.

    It sends as many bytes as a ring, and needs a buffer as large as the module's gradients in float32.
    """

    def __init__(self, turn: Turn):
        self.turn = turn

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce float32 [ranks * N] to [N]. FSDP2 keeps the first output of a step as the gradients'
        memory and adds later outputs to it."""
        if self.turn.is_filler:
            input_tensor.fill_(NOTHING)
        # Sums go into the first output; later outputs stay neutral, since FSDP2 adds them to it.
        output_tensor.fill_(NOTHING)
        total = self.turn.sums.setdefault(self, output_tensor)
        distributed.add_in_order(total, input_tensor, group)
