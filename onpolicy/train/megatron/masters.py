"""Master weights under Megatron, where a model computes with rounded weights.

As FSDP2's masters (`train/fsdp/masters.py`), they are rounded once after each step, over whole tensors,
which tensor-parallel ranks gather for that; pipeline stages and expert-parallel ranks hold whole
tensors. A master has the dtype that is pushed; in bfloat16 Megatron's optimizer keeps its own float32
copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from onpolicy.train.megatron.collectives import gather_rows
from onpolicy.train.megatron.parts import Part
from onpolicy.train.megatron.weights import Place, global_parameters, unwrap, weight_map_of
from onpolicy.weights.rounding import is_rounded, round_weight


class Masters:
    """The masters of a model's rounded weights. Make it after the optimizer, which starts from
    unrounded weights. Frozen weights, such as the base model of adapters, are rounded once and have no
    masters."""

    def __init__(self, model: nn.Module, weight_format: str, *, trained: bool):
        """Round the weights of `model`, if there is a format; `trained`: keep masters."""
        policy = unwrap(model)
        self._map, self._format, self._place = weight_map_of(policy), weight_format, Place.mine()
        shapes = self._map.shapes() if weight_format else {}
        self._shapes = {
            name: shape
            for name, shape in shapes.items()
            if is_rounded(name, torch.empty(shape, device="meta"))
        }
        named = global_parameters(policy)
        self._rounded = {
            name: parameter.detach()
            for name, parameter in named.items()
            if self._parts(name, self._place.tp_rank)
        }
        kept = [name for name in self._rounded if trained and named[name].requires_grad]
        self.beside = {name: torch.empty_like(named[name]) for name in kept}
        """Masters, by the global names of the parameters, in their shapes."""
        for name in self._rounded:
            self._round(name)

    def round(self) -> None:
        """Copy the parameters to the masters, and round the parameters; collective."""
        for name in self.beside:
            self._round(name)

    def _round(self, name: str) -> None:
        group, parameter = parallel_state.get_tensor_model_parallel_group(), self._rounded[name]
        if name in self.beside:
            self.beside[name].copy_(parameter)
        held = gather_rows(parameter, group).chunk(group.size())
        whole = {
            key: round_weight(tensor, self._format)
            for key, tensor in self._put_together(name, held).items()
        }
        for part in self._parts(name, self._place.tp_rank):
            parameter[part.target] = whole[part.name][part.source]

    def swap(self) -> None:
        """Swap masters and rounded weights."""
        for name, master in self.beside.items():
            rounded = self._rounded[name].clone()
            self._rounded[name].copy_(master)
            master.copy_(rounded)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the masters into the model's parameters within this context."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def _put_together(self, name: str, held: Sequence[Tensor]) -> dict[str, Tensor]:
        """Assemble a checkpoint's tensors from each tensor-parallel rank's shard of `name`."""
        whole: dict[str, Tensor] = {}
        for rank, parameter in enumerate(held):
            for part in self._parts(name, rank):
                empty = parameter.new_empty(self._shapes[part.name])
                whole.setdefault(part.name, empty)[part.source] = parameter[part.target]
        return whole

    def _parts(self, name: str, tp_rank: int) -> list[Part]:
        """Return a parameter's parts of tensors that are rounded."""
        parts = self._map.parts(name, tp_rank, self._place.ep_rank)
        return [part for part in parts if part.name in self._shapes]
