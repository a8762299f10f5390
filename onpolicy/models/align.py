"""Replacement of a Hugging Face model's modules by the aligned operators, for any architecture.

The same function prepares the trainer's model and the one inside SGLang. It replaces the following
modules of one model, each only where the replacement is known to compute the same function:

- `nn.Linear`;
- norms (`norms.py`), and the rotary embedding that an attention module calls (`rotary.py`);
- parameter-free activation functions; where an MLP multiplies one with another projection, both are
  one operator. Such an MLP is recognised by what it computes: its own forward pass runs on
  stand-ins for its layers, whose results show the order of the operations and any further
  operation. Another MLP keeps its code, in both engines;
- gated delta networks (`delta_net.py`), and the sigmoid gate of attention (`output_gate.py`);
- the experts of a layer (`expert_layers.py`); the router beside them then runs by the operators.

Attention goes through transformers' attention interface (`attention_function.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Container
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from onpolicy.models.delta_net import is_delta_net, parts_of_delta_nets, recur_by_operators
from onpolicy.models.expert_layers import (
    AlignedExperts,
    expert_blocks,
    has_usual_experts,
    route_by_operators,
    routers_of,
)
from onpolicy.models.norms import AlignedLayerNorm, AlignedRMSNorm, aligned_norm, is_norm
from onpolicy.models.rotary import rotate_by_operators
from onpolicy.models.rounded_inputs import operators_of
from onpolicy.models.tensor_parallel import row_parallel_linears
from onpolicy.ops.base import Operators
from onpolicy.ops.checks.fixed_numbers import probe
from onpolicy.ops.row_parallel import WHOLE, RowParallel

SINKS = {"sinks"}
"""Names of the parameter that an attention module passes to its attention function as sinks."""

_ACTIVATIONS = {c[0] if isinstance(c, tuple) else c for c in ACT2CLS.values()}


def align_modules(
    model: nn.Module, operators: Operators, row_parallel: RowParallel = WHOLE
) -> None:
    """Replace, in place, every module of `model` that has an aligned counterpart.

    `row_parallel` says how experts sum over their intermediate axis, and how linears sum over K
    that the tensor-parallel plan of a Hugging Face model shards. (SGLang's model has its own
    linears.)
    """
    shared = row_parallel_linears(model) if isinstance(model, PreTrainedModel) else set()
    _keep_stored_buffers_whole(model)
    for parent in list(model.modules()):
        if isinstance(parent, (AlignedLinear, AlignedRMSNorm, AlignedLayerNorm, AlignedActivation)):
            continue
        has_experts = False
        for name, child in list(parent.named_children()):
            replacement = _aligned(child, operators, row_parallel, shared)
            if replacement is not None:
                setattr(parent, name, replacement)
            has_experts |= isinstance(replacement, AlignedExperts)
            if is_gated_mlp(child):
                gate_by_operators(child, operators)
            rotate_by_operators(child, operators)
            if is_delta_net(child):
                recur_by_operators(child, operators)
        # The block's router can be wrapped only once every module beside it is aligned.
        if has_experts:
            route_by_operators(parent, operators)


def _aligned(
    module: nn.Module, operators: Operators, row_parallel: RowParallel, shared: set[nn.Linear]
) -> nn.Module | None:
    if type(module) is nn.Linear:
        return AlignedLinear(module, operators, row_parallel if module in shared else WHOLE)
    if (norm := aligned_norm(module, operators)) is not None:
        return norm
    if type(module) in _ACTIVATIONS and not list(module.parameters()):
        return AlignedActivation(module, operators)
    if has_usual_experts(module):
        return AlignedExperts(module, operators, row_parallel)
    return None


def _keep_stored_buffers_whole(model: nn.Module) -> None:
    """Keep the stored buffers of a checkpoint (a router's score correction) in float32.

    SGLang builds the model in the dtype that it serves, and would round them.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            is_stored = name not in module._non_persistent_buffers_set
            if is_stored and buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.float()


def replace_operators(model: nn.Module, operators: Operators) -> None:
    """Replace the operators of a model that `align_modules` prepared."""
    for module in model.modules():
        if hasattr(module, "operators"):
            module.operators = operators  # type: ignore[assignment]


class AlignedLinear(nn.Linear):
    """A `nn.Linear` computed by the operators, with the parameters of the layer that it replaces.

    `row_parallel` says how it sums over K: in one block, unless tensor parallelism shards K.
    """

    def __init__(self, linear: nn.Linear, operators: Operators, row_parallel: RowParallel):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.operators, self.row_parallel = operators, row_parallel

    def forward(self, x: Tensor) -> Tensor:
        operators = operators_of(self, self.operators)
        return operators.row_parallel_linear(x, self.weight, self.bias, self.row_parallel)


class AlignedActivation(nn.Module):
    """An activation function computed by `Operators.elementwise`."""

    def __init__(self, activation: nn.Module, operators: Operators):
        super().__init__()
        self.activation, self.operators = activation, operators

    def forward(self, x: Tensor) -> Tensor:
        return self.operators.elementwise(self.activation, x)


_STAND_INS = {
    "gate_proj": lambda x: 1000 * x.roll(1, -1) - 3,
    "up_proj": lambda x: 700 * x.flip(-1) + 1,
    "act_fn": lambda x: (x + 2).abs() - 5,
    "down_proj": lambda x: x.roll(2, -1) + 0.25 * x,
}
"""Stand-ins of which no two can be swapped; large enough numbers to reach a clamp, if there is one."""


def is_gated_mlp(module: nn.Module) -> bool:
    """Return whether the module only computes `down_proj(act_fn(gate_proj(x)) * up_proj(x))`."""
    if "forward" in vars(module) or not all(hasattr(module, name) for name in _STAND_INS):
        return False
    stripped: Any = copy.copy(module)
    vars(stripped).update(_STAND_INS)
    x = probe(1, 3, 8, seed=1)
    try:
        got = type(module).forward(stripped, x)
    except Exception:  # a module's own code may raise anything on stand-ins
        return False
    return isinstance(got, Tensor) and torch.equal(got, _gated(x, **_STAND_INS))


def _gated(x: Tensor, gate_proj: Any, up_proj: Any, act_fn: Any, down_proj: Any) -> Tensor:
    out: Tensor = down_proj(act_fn(gate_proj(x)) * up_proj(x))
    return out


def gate_by_operators(mlp: Any, operators: Operators) -> None:
    """Make `mlp`, which is a gated MLP, compute `Operators.gated` between its linears."""
    mlp.operators, mlp.forward = operators, MethodType(_forward, mlp)


def _forward(mlp: Any, x: Tensor) -> Tensor:
    activation = getattr(mlp.act_fn, "activation", mlp.act_fn)
    out: Tensor = mlp.down_proj(mlp.operators.gated(activation, mlp.gate_proj(x), mlp.up_proj(x)))
    return out


def unaligned_modules(model: nn.Module, norms: Container[nn.Module]) -> list[str]:
    """Return the class names of modules without a known aligned counterpart.

    A module counts if it holds parameters or is a norm. `norms` are the norms of a known kind. A
    module that holds no parameters and is no norm is taken to be element-wise.
    """
    blocks = expert_blocks(model)
    routing = {b for block in blocks for b in (block, *block.children()) if not is_norm(b)}
    routing |= {part for block in blocks for r in routers_of(block) for part in r.modules()}
    known = routing | parts_of_delta_nets(model)
    return sorted(
        {
            type(module).__name__
            for module in model.modules()
            if (
                is_norm(module)
                or {name for name, _ in module.named_parameters(recurse=False)} - SINKS
            )
            and not (type(module) is nn.Linear or module in norms or is_known_embedding(module))
            and module not in known
        }
    )


def scaled(embedded: Tensor, scale: Tensor) -> Tensor:
    """Return the looked-up rows times the factor of a scaled input embedding (Gemma's).

    The factor is rounded to the rows' dtype first.
    """
    return embedded * scale.to(embedded.dtype)


def is_known_embedding(module: Any) -> bool:
    """Return whether the module is an embedding lookup, scaled at most by its `embed_scale`."""
    if type(module) is nn.Embedding:
        return True
    scale = getattr(module, "embed_scale", None)
    if not isinstance(module, nn.Embedding) or not isinstance(scale, Tensor):
        return False
    weight, ids = probe(5, 4, seed=1).bfloat16(), torch.tensor([[3, 1, 4]])
    scale = torch.tensor(1.2345678)  # bfloat16 cannot represent it
    try:
        got = torch.func.functional_call(module, {"weight": weight, "embed_scale": scale}, (ids,))
    except Exception:  # a module's own code may raise anything on a probe
        return False
    return torch.equal(got, scaled(F.embedding(ids, weight), scale))
