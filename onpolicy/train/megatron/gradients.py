"""Gradients of micro-batches and data-parallel ranks, added in one order however many ranks there are.

Megatron adds up a rank's micro-batches in its buffers, and then what all ranks' buffers hold. Here ranks
exchange what they hold after every micro-batch, and each adds its part in the order of the packing
(`train/packing.py`), as one rank does that computes every micro-batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor

from onpolicy.train import distributed
from onpolicy.train.megatron.layout import MegatronLayout
from onpolicy.train.megatron.stages import config_of

_BLOCK = 1 << 24
"""Elements that ranks exchange at once."""


def orders_gradients(layout: MegatronLayout) -> bool:
    """Whether buffers hold one micro-batch at a time, of one rank's samples: a pipeline runs backward
    passes of several at its end, and a rank's experts compute the tokens of other ranks too."""
    return layout.pipeline_model_parallel_size == layout.expert_model_parallel_size == 1


class _Block(NamedTuple):
    """Some elements of a gradient buffer, and of their sums those that this rank keeps."""

    held: Tensor
    sums: Tensor
    group: dist.ProcessGroup

    def take(self) -> None:
        ours = F.pad(self.held, (0, self.group.size() * len(self.sums) - len(self.held)))
        distributed.add_in_order(self.sums, ours, self.group)
        self.held.zero_()

    def put_back(self) -> None:
        first = self.group.rank() * len(self.sums)
        ours = self.held[first : first + len(self.sums)]
        ours.copy_(self.sums[: len(ours)])


class OrderedGradients:
    """The sums so far of a model's gradient buffers, of which every rank keeps a part.

    It stands in front of Megatron's own sum over ranks, to which it leaves nothing to round.
    """

    def __init__(self, model: DistributedDataParallel):
        self._buffers = [
            (buffer.grad_data, buffer.data_parallel_group)
            for buffer in model.buffers + model.expert_parallel_buffers
            if buffer.data_parallel_group.size() > 1
        ]
        self._blocks: list[_Block] = []
        config_of(model).finalize_model_grads_func = self._finish

    def start(self) -> None:
        """Begin an optimizer step, whose buffers are zero."""
        self._blocks = [
            _Block(held, held.new_zeros(-(-len(held) // group.size())), group)
            for gradients, group in self._buffers
            for held in gradients.split(_BLOCK)
        ]

    def take(self) -> None:
        """Add what the buffers of all ranks hold of one micro-batch each, and empty them."""
        for block in self._blocks:
            block.take()

    def _finish(self, *args: Any, **kwargs: Any) -> None:
        """Every element is in one rank's buffer now, and 0 in the others': any sum of them is exact."""
        self.take()
        for block in self._blocks:
            block.put_back()
        self._blocks = []
        finalize_model_grads(*args, **kwargs)
