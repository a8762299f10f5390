"""AdamW under FSDP2, from the ranks' gradients to the sharded float32 master weights.

FSDP2 adds the ranks' gradients of one micro-batch each, in the communication library's order, and adds
that sum to the earlier ones. Additions round, so the bits depend on the number of ranks. Here a rank
adds the contributions to its shard in the order of the packing (`training/shares.py`), one by one, as a
single rank does that computes every micro-batch. The order is the same for any number of ranks.

Where a model computes with rounded weights, the optimizer updates `Masters`, which checkpoints hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from onpolicy.config.groups import TrainerConfig
from onpolicy.models.policy import PolicyModel
from onpolicy.models.stored import stored_tensors
from onpolicy.ops import Operators
from onpolicy.training import distributed
from onpolicy.training.fsdp.replicas import Replicas, keep_for_stream
from onpolicy.training.fsdp.sharding import PREFIX, rows_of
from onpolicy.training.gradient_norm import run_in_blocks
from onpolicy.training.state import create_missing_moments
from onpolicy.weights.rounding import is_rounded, round_weight

NOTHING = -0.0
"""Neutral element of addition; 0.0 would turn -0.0 into 0.0."""


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


def sum_gradients(model: nn.Module, *, in_order: bool, replicas: Replicas | None = None) -> Turn:
    """Make FSDP2 sum the ranks' gradients instead of averaging them: in the order of micro-batches, or
    in the communication library's own.

    The returned `Turn` must be set before every backward pass, on every rank.
    """
    turn = Turn(replicas)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A mean over three ranks would round. Unless the sum is forced, a factor of 1 becomes
            # a premultiplied sum, which gloo lacks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if in_order:
                ordered = OrderedReduceScatter(turn)
                module.set_custom_reduce_scatter(ordered)
                if replicas is not None and replicas.shard_ranks == 1:  # FSDP2 would not call it
                    module.set_all_reduce_hook(ordered.reduce_unsharded)
            elif replicas is not None:
                module.set_all_reduce_hook(replicas.add)
    return turn


@dataclass(slots=True)
class Turn:
    """The current micro-batch of a rank, and the sums of the micro-batches before it."""

    replicas: Replicas | None = None
    is_filler: bool = False

    sums: dict[object, Tensor] = field(default_factory=dict)
    """Sums of this optimizer step, by reduce-scatter; they share the gradients' memory and are cleared
    with them."""

    def finish_sums(self) -> None:
        """Complete the sums after the last micro-batch, since each replica has a part; collective."""
        if self.replicas is not None:
            for total in self.sums.values():
                self.replicas.add(total)


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
        if self.turn.replicas is None:
            distributed.add_in_order(total, input_tensor, group)
        else:
            self.turn.replicas.add_in_order(total, input_tensor)

    def reduce_unsharded(self, gradients: Tensor) -> None:
        """Reduce the gradients of a rank that shares its replica with no other, in place."""
        assert self.turn.replicas is not None
        keep_for_stream(gradients)
        self(gradients, gradients.clone(), self.turn.replicas.mesh.get_group(), None)


class Masters:
    """The masters of a model's rounded weights; every method is collective.

    The gradient of a rounded weight updates its master: straight-through (Bengio et al.,
    arXiv:1308.3432). Masters are rounded once after each step, from the dtype that is pushed, since a
    deployment rounds the weights that it receives, and rounding from float32 sometimes differs. Whole
    tensors are rounded and each rank keeps its rows, since rows of several ranks may share a scale.
    Frozen weights (the base model of adapters, a reference) are rounded once and have no masters.
    """

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
