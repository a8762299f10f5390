"""Gradients of all micro-batches and ranks, added in one order however many ranks there are.

FSDP2 adds what the ranks have of a micro-batch each, in the communication library's order, and then that
to what is there. Additions round, so another number of ranks has other bits. Here a rank adds what it
gets of its shard in the order of the packing (`train/shares.py`), onto what is there, as one rank does
that computes every micro-batch.
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
"""What changes no number that it is added to; 0.0 makes another zero of -0.0."""


@dataclass(slots=True)
class Turn:
    """The micro-batch that a rank computes, and what those before it have added up to."""

    is_filler: bool = False

    sums: dict[object, Tensor] = field(default_factory=dict)
    """The sums of this optimizer step, by who adds; they are the gradients' memory, and go with them."""


def sum_gradients(model: nn.Module, *, in_order: bool) -> Turn:
    """Have FSDP2 add the ranks' gradients, which it would average; in the order of micro-batches, or in
    the communication library's own.

    Before every backward pass the returned `Turn` has to be set, on every rank.
    """
    turn = Turn()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A mean of three ranks would round. Without a sum by force, a factor of 1 is a product
            # that gloo has not.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if in_order:
                module.set_custom_reduce_scatter(OrderedReduceScatter(turn))
    return turn


class OrderedReduceScatter(ReduceScatter):
    """Adds the gradients of one `fully_shard`ed module, on ranks that are more than one.

    As many bytes as a ring sends, and a buffer as large as the module's gradients in float32.
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
        """float32 [ranks * N] -> [N]; FSDP2 makes the first output of a step the gradients' memory, and
        adds the later ones to it."""
        if self.turn.is_filler:
            input_tensor.fill_(NOTHING)
        output_tensor.fill_(NOTHING)
        total = self.turn.sums.setdefault(self, output_tensor)
        distributed.add_in_order(total, input_tensor, group)
