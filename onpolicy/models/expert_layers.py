"""Experts and routers of any Hugging Face model, by the aligned operators, and routing replay (R3).

transformers holds the experts of a layer in two parameters, optionally with biases, and flags of
their class describe the layout (`use_experts_implementation`), which `AlignedExperts` reads.
Experts held in another layout are left as they are, and an aligned run refuses them by name. A
router is a few lines of the block around the experts, and differs between architectures. So the
block runs its own code, with the operators in place of the functions that are not row-invariant.

Under replay every token is trained with the experts that the rollout chose. The engines' kernels
differ in the last bits of a router's scores, which sometimes puts another expert into the top k,
and that changes the token's log-probability a lot. The routing weights are the trainer's own, with
gradient.
Source: Ma et al., Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers
(arXiv 2510.11370).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import _default_apply_gate

from onpolicy.errors import ContractError
from onpolicy.models.facts import ModelFacts
from onpolicy.models.norms import is_norm
from onpolicy.models.rounded_inputs import InputRounding
from onpolicy.ops.base import Operators
from onpolicy.ops.mixture_of_experts import Gate, gated_halves, mix_experts
from onpolicy.ops.row_parallel import RowParallel


class AlignedExperts(nn.Module):
    """The experts of a layer computed by `mix_experts`, with the parameters of the replaced module.

    gate_up_proj: [E, 2 I / P, H]; down_proj: [E, H, I / P], on each of P tensor-parallel ranks;
    both have their last two axes swapped if `is_transposed`. Biases: gate_up_proj_bias [E, 2 I /
    P]; down_proj_bias [E, H]. If the module has a gate of its own, its code runs by the operators.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, experts: Any, operators: Operators, row_parallel: RowParallel):
        super().__init__()
        for name, parameter in list(experts.named_parameters(recurse=False)):
            self.register_parameter(name, parameter)
            delattr(experts, name)
        self.is_transposed = experts.is_transposed
        self.own_gate: Gate | None = None if _has_default_gate(experts) else experts._apply_gate
        self.act_fn: Any = getattr(experts, "act_fn", None)
        self.operators, self.row_parallel = operators, row_parallel
        self.rounding: InputRounding | None = None
        """The rounding of the inputs of both products, if they are rounded (`rounded_inputs.py`)."""
        self.lora: Any = None
        """The adapters of the experts, if they have any (`lora/adapters.py`)."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the layer: [T, H], int64 [T, k], [T, k] -> [T, H]."""
        gate, rounding = self._gate(), self.rounding
        if rounding is not None:
            hidden_states, gate = rounding(hidden_states), rounding.after(gate, self.row_parallel)
        return mix_experts(
            self.operators,
            hidden_states,
            top_k_index,
            top_k_weights,
            self.weight(self.gate_up_proj),
            self.weight(self.down_proj),
            gate,
            self.row_parallel,
            gate_up_bias=getattr(self, "gate_up_proj_bias", None),
            down_bias=getattr(self, "down_proj_bias", None),
            adapter=self.lora.factors if self.lora is not None and self.lora.is_on else None,
            in_few_kernels=rounding is None,
        )

    def weight(self, parameter: Tensor) -> Tensor:
        """Return the parameter as contiguous [E, out, in], also if it is held transposed."""
        return parameter.transpose(1, 2).contiguous() if self.is_transposed else parameter

    def _gate(self) -> Gate:
        if self.own_gate is None:
            return gated_halves(self.operators, self.act_fn)
        own_gate = self.own_gate

        def by_operators(gate_up: Tensor) -> Tensor:
            with torch._C._EnableTorchFunction(), ByOperators(self.operators, None):
                return own_gate(gate_up)

        return by_operators


def has_usual_experts(module: Any) -> bool:
    """Return whether `module` is a class of experts whose flags describe its whole layout."""
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
    """Return (experts E, this rank's intermediate I, hidden H) of a usual experts module."""
    num_experts, *sizes = experts.down_proj.shape
    hidden, intermediate = reversed(sizes) if experts.is_transposed else sizes
    return num_experts, intermediate, hidden


def unusual_experts(model: nn.Module) -> list[str]:
    """Return the class names of modules that hold experts (3-d parameters) in another layout."""
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
    """Return the distinct (experts E, intermediate I, hidden H, top k) of the model's layers."""
    k: Any = getattr(model.config, "num_experts_per_tok", None)
    return {(*expert_sizes(experts), k) for experts in experts_of(model)}


def router_shapes(model: nn.Module) -> set[tuple[int, int, bool]]:
    """Return (out features, in features, has bias) of the routers that call `F.linear` themselves."""
    routers: list[Any] = [router for block in expert_blocks(model) for router in routers_of(block)]
    return {(*r.weight.shape, getattr(r, "bias", None) is not None) for r in routers}


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that `AlignedExperts` replaces, layer after layer."""
    return [module for module in model.modules() if has_usual_experts(module)]


def expert_names(model: nn.Module) -> set[str]:
    """Return the last parts of the names of a model's expert modules."""
    return {name.rpartition(".")[2] for name, m in model.named_modules() if has_usual_experts(m)}


def expert_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold a layer's experts and its router."""
    return [block for block in model.modules() if any(map(has_usual_experts, block.children()))]


def routers_of(block: nn.Module) -> list[nn.Module]:
    """Return the routers of an MoE block that are custom modules and not plain linear layers.

    A block may be a whole decoder layer (Gemma-4's), with norms beside its experts.
    """
    parts = [m for m in block.children() if type(m) is not nn.Linear and not is_norm(m)]
    return [part for part in parts if hasattr(part, "weight")]


def choosers(model: nn.Module) -> set[nn.Module]:
    """Return the routers, and the linears that score a shared expert as a whole."""
    found: set[nn.Module] = set()
    for block in expert_blocks(model):
        scores = {1, *(expert_sizes(experts)[0] for experts in experts_of(block))}
        linears = (m for m in block.children() if type(m) is nn.Linear)
        found |= {*routers_of(block), *(m for m in linears if m.out_features in scores)}
    return found


def route_by_operators(block: Any, operators: Operators) -> None:
    """Make `block`, which holds a router and its experts, run its own code by `operators`."""
    forward = block.forward

    def routed(*args: Any, **kwargs: Any) -> Any:
        with ByOperators(block.operators, block.replayed_choice):
            return forward(*args, **kwargs)

    block.operators = operators
    block.replayed_choice = None
    block.forward = routed
    # Children that are aligned already, or hold no parameters, skip the mode's overhead.
    for child in block.children():
        if hasattr(child, "operators") or not list(child.parameters(recurse=False)):
            child.forward = _outside(child.forward)
        if isinstance(child, AlignedExperts) and not hasattr(block, "num_experts"):
            # DeepSeek-V2's routing by groups reads it and does not set it (transformers 5.12.1).
            block.num_experts = expert_sizes(child)[0]


def _outside(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` without the function mode, for an aligned layer that is not a router."""

    def undisturbed(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return forward(*args, **kwargs)

    return undisturbed


Choice = Callable[[Tensor, int], Tensor]
"""A function from a router's choice, int64 [..., k], and the number of candidates to the choice to
use."""


class ByOperators(TorchFunctionMode):
    """A mode that replaces the PyTorch functions that routers call by the operators.

    `choice` may replace the experts that the router chose (see `models/expert_layers.py`).
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
        """Return the top k, always sorted, whether or not the caller asked for it."""
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
    """Yield a list that collects the number of candidates of each top-k call inside."""
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

OWN_CHOICE = -1
"""Placeholder where the rollout's experts are not known: the trainer's router chooses."""


class RoutingReplay:
    """The rollout's experts for the tokens of a micro-batch, and counts of the differing choices.

    T: tokens; L: layers of the model, dense ones included; k: experts per token.
    """

    def __init__(self, experts: Tensor, chosen_per_token: int):
        """Take the experts, integer [T, L * k], layer by layer."""
        self.experts = experts.view(len(experts), -1, chosen_per_token).long()
        # Counts stay on the device: reading them would synchronise in every layer.
        self._replayed = self._differing = torch.zeros((), device=experts.device)

    def choose(self, layer: int, num_experts: int, own: Tensor, candidates: int) -> Tensor:
        """Return the rollout's experts in place of `own`, the router's: int64 [..., k] -> [..., k].

        A choice out of fewer `candidates` is a choice of expert groups, and is returned as it is.
        """
        if candidates != num_experts:
            return own
        rollout = self.experts[:, layer].view(own.shape)
        known = (rollout != OWN_CHOICE).all(-1)
        differs = known & (rollout.sort(-1).values != own.sort(-1).values).any(-1)
        self._replayed = self._replayed + known.sum()
        self._differing = self._differing + differs.sum()
        return torch.where(known[..., None], rollout, own)

    def counts(self) -> dict[str, Tensor]:
        """Return the numbers of replayed (token, layer) pairs, and of pairs where `own` differed."""
        return {"routing/num_replayed": self._replayed, "routing/num_differing": self._differing}


def replay_routing(model: nn.Module, replay: RoutingReplay | None) -> None:
    """Make every router of `model` follow `replay` from now on; None: its own choice."""
    for name, block in model.named_modules():
        if hasattr(block, "replayed_choice"):
            experts = next(m for m in block.children() if isinstance(m, AlignedExperts))
            layer = int(re.findall(r"layers\.(\d+)", name)[-1])
            choice = replay and partial(replay.choose, layer, len(experts.gate_up_proj))
            block.replayed_choice = choice


def can_be_replayed(facts: ModelFacts) -> bool:
    """Return whether every router of the model chooses by one top-k over all experts of its layer.

    A router that cannot run on the meta device counts as one that does not.
    """
    wanted = [expert_sizes(experts)[0] for experts in experts_of(facts.model)]
    try:
        with watch_choices() as candidates:
            facts.run_one_token()
    except Exception:  # a model's own code may raise anything
        return False
    return [n for n in candidates if n in wanted] == wanted
