"""Mixture-of-experts layers by the aligned operators, in whatever Hugging Face model has them.

transformers holds the experts of a layer in two parameters, maybe with biases, and every class of
experts says by flags how (`use_experts_implementation`). `AlignedExperts` reads the flags and takes
such a class's place; experts that are held in another way are left, and refused by name where bits
are promised.

A router is a few lines of the block around the experts, other ones in every architecture. So that
block runs its own code, in which the functions that are not row-invariant are answered by the
operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import _default_apply_gate

from onpolicy.errors import ContractError
from onpolicy.ops.base import Operators
from onpolicy.ops.experts import gated_halves, mix_experts
from onpolicy.ops.row_parallel import RowParallel

Choice = Callable[[Tensor, int], Tensor]
"""(what a router chose, int64 [..., k], out of how many) -> what it is to choose."""


class AlignedExperts(nn.Module):
    """All experts of a layer by `mix_experts`; takes over the parameters of the module it replaces.

    gate_up_proj: [E, 2 I / P, H]; down_proj: [E, H, I / P], on each of P tensor-parallel ranks; both
    with the last two axes exchanged if `is_transposed`. With biases gate_up_proj_bias: [E, 2 I / P];
    down_proj_bias: [E, H]. The module's own gate, if it has one, runs its own code by the operators.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, experts: Any, operators: Operators, row_parallel: RowParallel):
        super().__init__()
        for name, parameter in list(experts.named_parameters(recurse=False)):
            self.register_parameter(name, parameter)
            delattr(experts, name)
        self.is_transposed = experts.is_transposed
        self.own_gate = None if _has_default_gate(experts) else experts._apply_gate
        self.act_fn = None if self.own_gate else experts.act_fn
        self.operators, self.row_parallel = operators, row_parallel

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H], int64 [T, k], [T, k] -> [T, H]."""
        gate_up, down = (
            p.transpose(1, 2) if self.is_transposed else p
            for p in (self.gate_up_proj, self.down_proj)
        )
        return mix_experts(
            self.operators,
            hidden_states,
            top_k_index,
            top_k_weights,
            gate_up,
            down,
            self._gate_by_operators if self.own_gate else gated_halves(self.operators, self.act_fn),
            self.row_parallel,
            gate_up_bias=getattr(self, "gate_up_proj_bias", None),
            down_bias=getattr(self, "down_proj_bias", None),
        )

    def _gate_by_operators(self, gate_up: Tensor) -> Tensor:
        with torch._C._EnableTorchFunction(), _ByOperators(self.operators, None):
            gated: Tensor = self.own_gate(gate_up)
            return gated


def has_usual_experts(module: Any) -> bool:
    """Whether `module` is a class of experts whose flags say all that `AlignedExperts` must know."""
    if not getattr(module, "has_gate", False) or not hasattr(module, "is_transposed"):
        return False
    names = {"gate_up_proj", "down_proj"}
    if module.has_bias:
        names |= {f"{name}_bias" for name in names}
    is_told = module.is_concatenated or not _has_default_gate(module)
    return is_told and {name for name, _ in module.named_parameters(recurse=False)} == names


def _has_default_gate(experts: Any) -> bool:
    return type(experts)._apply_gate is _default_apply_gate


def expert_sizes(experts: Any) -> tuple[int, int, int]:
    """(experts E, intermediate I, hidden H) of a module that `has_usual_experts`, or one rank's I."""
    num_experts, *sizes = experts.down_proj.shape
    hidden, intermediate = reversed(sizes) if experts.is_transposed else sizes
    return num_experts, intermediate, hidden


def unusual_experts(model: nn.Module) -> list[str]:
    """Names of the classes that hold experts, three-dimensional parameters, in another way."""
    return sorted(
        {
            type(module).__name__
            for module in model.modules()
            if any(p.dim() == 3 for p in module.parameters(recurse=False))
            and not type(module).__module__.startswith("torch.nn.")
            and not has_usual_experts(module)
        }
    )


def experts_shapes(model: PreTrainedModel) -> set[tuple[int, int, int, int]]:
    """Distinct (experts E, intermediate I, hidden H, chosen per token k) of the model's layers."""
    chosen = getattr(model.config, "num_experts_per_tok", None)
    k = max(chosen) if isinstance(chosen, list) else chosen
    return {(*expert_sizes(experts), k) for experts in experts_of(model)}


def router_shapes(model: nn.Module) -> set[tuple[int, int, bool]]:
    """(out features, in features, has bias) of routers that call `F.linear` themselves."""
    routers: list[Any] = [router for block in expert_blocks(model) for router in routers_of(block)]
    return {(*r.weight.shape, getattr(r, "bias", None) is not None) for r in routers}


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that `AlignedExperts` takes the place of, layer after layer."""
    return [module for module in model.modules() if has_usual_experts(module)]


def expert_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that hold a layer's experts and its router."""
    return [block for block in model.modules() if any(map(has_usual_experts, block.children()))]


def routers_of(block: nn.Module) -> list[nn.Module]:
    """Those of a block that are no linear layers: the block's or their own code chooses."""
    return [m for m in block.children() if not isinstance(m, nn.Linear) and hasattr(m, "weight")]


def route_by_operators(block: Any, operators: Operators) -> None:
    """Make `block`, which holds a router and its experts, run its own code by `operators`."""
    forward = block.forward

    def routed(*args: Any, **kwargs: Any) -> Any:
        with _ByOperators(block.operators, block.replayed_choice):
            return forward(*args, **kwargs)

    block.operators = operators
    block.replayed_choice = None
    block.forward = routed
    for child in block.children():
        if isinstance(child, AlignedExperts) or not list(child.parameters(recurse=False)):
            child.forward = _outside(child.forward)
        if isinstance(child, AlignedExperts) and not hasattr(block, "num_experts"):
            # DeepSeek-V2's routing by groups reads it and does not set it (transformers 5.12.1).
            block.num_experts = expert_sizes(child)[0]


def _outside(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a layer that is no router: aligned already, so it is spared the detour."""

    def undisturbed(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return forward(*args, **kwargs)

    return undisturbed


class _ByOperators(TorchFunctionMode):
    """While it is entered, functions of PyTorch's that routers call are the operators'.

    `choice` may put other experts in place of the router's own (see `models/routing_replay.py`).
    """

    def __init__(self, operators: Operators, choice: Choice | None):
        super().__init__()
        self.operators, self.choice = operators, choice

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _TOPK:
            return self._topk(*args, **kwargs)
        if function in _ANSWERS:
            return _ANSWERS[function](self.operators, *args, **kwargs)
        if function in _ELEMENTWISE:
            x, *rest = args
            return self.operators.elementwise(lambda x: function(x, *rest, **kwargs), x)
        return function(*args, **kwargs)

    def _topk(
        self, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> tuple[Tensor, Tensor]:
        """In order in any case; a model that does not ask for it does not mind."""
        _require_last("topk", input, dim)
        assert largest, "no router chooses the experts that it likes least"
        values, indices = self.operators.topk(input.reshape(-1, input.shape[-1]), k)
        values, indices = values.view(*input.shape[:-1], k), indices.view(*input.shape[:-1], k)
        if self.choice is not None:
            indices = self.choice(indices, input.shape[-1])
            values = input.gather(-1, indices)
        return torch.return_types.topk((values, indices))


@contextmanager
def watch_choices() -> Iterator[list[int]]:
    """Out of how many each top-k inside chose."""
    candidates: list[int] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function in _TOPK:
                candidates.append(args[0].shape[-1])
            return function(*args, **(kwargs or {}))

    with Watch():
        yield candidates


def _linear(
    operators: Operators, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return operators.linear(input, weight, bias)


def _softmax(
    operators: Operators,
    input: Tensor,
    dim: int,
    *,
    dtype: torch.dtype | None = None,
    _stacklevel: int = 0,
) -> Tensor:
    _require_last("softmax", input, dim)
    return operators.softmax(input).to(dtype or input.dtype)


def _require_last(name: str, input: Tensor, dim: int) -> None:
    if dim not in (-1, input.dim() - 1):
        raise ContractError(
            f"operator={name}, dim={dim}, shape={tuple(input.shape)}: a router works along another "
            "axis than the last, for which there is no aligned operator. Run without "
            "--true-on-policy-mode."
        )


_ANSWERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), _softmax),
}
_TOPK = {torch.topk, Tensor.topk}
_ELEMENTWISE = {F.silu, F.gelu, torch.sigmoid, Tensor.sigmoid}
