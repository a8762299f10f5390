"""Mixture-of-experts layers computed by the aligned operators, in any Hugging Face model.

transformers holds the experts of a layer in two parameters, optionally with biases, and flags of
the experts' class describe their layout (`use_experts_implementation`). `AlignedExperts` reads the
flags and replaces such a module. Experts held in another layout are left as they are, and an
aligned run refuses them by name.

A router is a few lines of the block around the experts, and differs between architectures. So the
block runs its own code, with the operators in place of the functions that are not row-invariant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import _default_apply_gate

from onpolicy.models.by_operators import ByOperators
from onpolicy.models.norms import is_norm
from onpolicy.models.rounded_inputs import InputRounding
from onpolicy.ops.base import Operators
from onpolicy.ops.experts import Gate, gated_halves, mix_experts
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
        """The adapters of the experts, if they have any (`lora/modules.py`)."""

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
