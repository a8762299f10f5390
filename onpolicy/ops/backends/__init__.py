"""The registry of backends: all that the rest of the house knows about a device's operators."""

from __future__ import annotations

from onpolicy.errors import ContractError
from onpolicy.ops.backends.base import Backend, Demand
from onpolicy.ops.backends.cpu import CPU
from onpolicy.ops.backends.hopper import HOPPER
from onpolicy.ops.backends.onednn import ONEDNN
from onpolicy.ops.backends.portable import PORTABLE
from onpolicy.ops.backends.stock import STOCK
from onpolicy.ops.backends.triton import TRITON

__all__ = ["BACKENDS", "CPU_BACKENDS", "GPU_BACKENDS", "Backend", "Demand", "backend_of"]

CPU_BACKENDS = (CPU, ONEDNN, PORTABLE)
"""In the order in which `--operators auto` asks them. The one that every CPU keeps comes first, so that
a run has the same bits on a CPU with bfloat16 instructions and on one without."""

GPU_BACKENDS = (HOPPER, TRITON)
"""Tried in order, the most particular first."""

BACKENDS = (*CPU_BACKENDS, *GPU_BACKENDS, STOCK)


def backend_of(name: str) -> Backend:
    """The entry of that name; raises ContractError if there is none."""
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    names = ", ".join(backend.name for backend in BACKENDS)
    raise ContractError(
        f"backend={name!r}: this version has the operator backends {names}. Start both engines with "
        "the same version of onpolicy."
    )
