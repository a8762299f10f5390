"""The output gate of attention by the operators: `attn_output * torch.sigmoid(gate)` of Qwen3-Next.

The last bit of a sigmoid on a CPU depends on how many elements follow it (`ops/cpu/layout.py`). The
attention module runs its own code, with the name `torch` bound to an object whose `sigmoid` is the
operators' and whose other attributes are torch's.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor


def names_of_gate(forward: FunctionType, module: Any) -> dict[str, Any]:
    """Return the global names to bind anew in the forward pass of attention with a sigmoid gate."""
    is_gated = hasattr(module, "is_causal") and "sigmoid" in forward.__code__.co_names
    return {"torch": _Torch(module)} if is_gated and forward.__globals__["torch"] is torch else {}


class _Torch:
    """The module `torch` with the sigmoid of a module's operators."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def sigmoid(self, x: Tensor) -> Tensor:
        """Compute it by `Operators.elementwise`."""
        out: Tensor = self._module.operators.elementwise(torch.sigmoid, x)
        return out
