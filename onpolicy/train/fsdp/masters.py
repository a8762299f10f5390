"""Master weights, which the optimizer updates and a checkpoint holds, where a model computes with
rounded weights.

The gradient of a rounded weight updates its master: straight-through (Bengio et al., arXiv:1308.3432).
Masters are rounded once after each step, from the dtype that is pushed, since a deployment rounds the
weights that it receives, and rounding from float32 sometimes differs. Whole tensors are rounded and
each rank keeps its rows, since rows of several ranks may share a scale. Frozen weights (the base model
of adapters, a reference) are rounded once and have no masters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from onpolicy.models.policy import PolicyModel
from onpolicy.models.stored import stored_tensors
from onpolicy.train.fsdp.sharding import PREFIX, rows_of
from onpolicy.weights.rounding import is_rounded, round_weight


class Masters:
    """The masters of a model's rounded weights; every method is collective."""

    def __init__(self, module: PolicyModel, weight_format: str, dtype: torch.dtype):
        """Round the weights of `module`, if there is a format, and keep masters of the trained ones."""
        self._module, self._format, self._dtype = module, weight_format, dtype
        named = dict(module.named_parameters())
        self._rounded = {
            name: parameter
            for name, parameter in (named.items() if weight_format else ())
            if self._parts(name, torch.empty(parameter.shape, device="meta"))
        }
        self.beside = {
            name: nn.Parameter(parameter.detach().clone())
            for name, parameter in self._rounded.items()
            if parameter.requires_grad
        }
        """Float32 masters, sharded as the parameters of the same names."""
        self.held: dict[str, nn.Parameter] = {**named, **self.beside}
        """Trained and saved tensors: masters, and parameters without a master."""
        for name, parameter in self._rounded.items():
            self._round(name, parameter)

    def take_gradients(self) -> None:
        """Give the masters the gradients of the rounded weights."""
        for name, master in self.beside.items():
            master.grad = self._rounded[name].grad

    def round(self) -> None:
        """Set the model's weights to the rounded masters."""
        for name, master in self.beside.items():
            master.grad = None
            self._round(name, master)

    @torch.no_grad()
    def _round(self, name: str, held: nn.Parameter) -> None:
        """Set a parameter to `held`, rounded."""
        cast, parameter = held.detach().to(self._dtype, copy=True), self._rounded[name]
        assert isinstance(cast, DTensor) and isinstance(parameter, DTensor)
        whole = cast.full_tensor()
        for part in self._parts(name, whole):
            part.copy_(round_weight(part, self._format))
        parameter.to_local().copy_(rows_of(parameter, whole))

    def _parts(self, name: str, whole: Tensor) -> list[Tensor]:
        """Return views of the parts that are rounded, one for each tensor in a checkpoint."""
        if not name.startswith(PREFIX):
            return []  # a critic's head
        stored = stored_tensors(self._module.causal_lm, name.removeprefix(PREFIX), whole)
        return [part for key, part in stored.items() if is_rounded(key, part)]
