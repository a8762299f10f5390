"""The activation and product of a gated MLP as one operator, in any Hugging Face model.

Such an MLP is recognised by what it computes: its own forward pass runs on stand-ins for its
layers, whose results show the order of the operations and any further operation. Another MLP stays
as it is, in both engines.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from onpolicy.ops.base import Operators
from onpolicy.ops.checks.probe import probe

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
