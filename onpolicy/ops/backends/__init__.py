"""The registry of operator backends, and the choice of one that a machine can keep.

Nothing here imports a GPU library: the entries judge recorded facts (`onpolicy/ops/machine.py`).
"""

from __future__ import annotations

from onpolicy.contract import OperatorShapes
from onpolicy.errors import ConfigError, ContractError
from onpolicy.ops.backends.base import Backend, Demand
from onpolicy.ops.backends.entries import (
    CPU,
    CUBLASLT,
    DEEP_GEMM,
    HOPPER,
    HOPPER_FP8,
    ONEDNN,
    PORTABLE,
    STOCK,
    TRITON,
)
from onpolicy.ops.machine import DISTRIBUTIONS, INSTALL, Machine

__all__ = [
    "BACKENDS",
    "CPU_BACKENDS",
    "GPU_BACKENDS",
    "STOCK",
    "Backend",
    "Demand",
    "backend_of",
    "choose_backend",
    "require_servable",
]

CPU_BACKENDS = (ONEDNN, CPU, PORTABLE)
"""CPU backends in the order that `--operators auto` tries, the fastest first
(`benchmarks/beside_trl.md`)."""

GPU_BACKENDS = (HOPPER, HOPPER_FP8, CUBLASLT, DEEP_GEMM, TRITON)
"""GPU backends in the order that `--operators auto` tries, the most specialised first."""

BACKENDS = (*CPU_BACKENDS, *GPU_BACKENDS, STOCK)


def backend_of(name: str) -> Backend:
    """Return the backend of that name; raise ContractError if there is none."""
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    names = ", ".join(backend.name for backend in BACKENDS)
    raise ContractError(
        f"backend={name!r}: this version has the operator backends {names}. Start both engines with "
        "the same version of onpolicy."
    )


def choose_backend(
    operators: str, dtype: str, shapes: OperatorShapes, row_parallel_blocks: int, machine: Machine
) -> str:
    """Return the contract's backend for `--operators`: auto, or a backend of this kind of machine.

    auto: the first whose kernels support this processor and model. A missing package never changes
    the choice.
    Raise ConfigError if the machine cannot keep the backend.
    """
    has_gpu = machine.capability is not None
    candidates = GPU_BACKENDS if has_gpu else CPU_BACKENDS
    names = [backend.name for backend in candidates]
    if operators not in ("auto", *names):
        raise ConfigError(
            f"--operators={operators}: this machine has {'a' if has_gpu else 'no'} GPU. Choose "
            f"{' or '.join(names)}, or leave it out."
        )
    demand = Demand(dtype=dtype, shapes=shapes, row_parallel_blocks=row_parallel_blocks)
    chosen = backend_of(
        _preferred(candidates, demand, machine) if operators == "auto" else operators
    )
    if problem := chosen.refusal(demand, machine):
        raise ConfigError(f"--operators={operators}: {problem}")
    return chosen.name


def require_servable(backend: str, machine: Machine) -> None:
    """Raise ConfigError if SGLang cannot serve this backend's operators on `machine`."""
    for module in backend_of(backend).engine_modules:
        if module not in machine.packages:
            raise ConfigError(
                f"operators={backend}: {module} is missing, which SGLang imports to serve them (package "
                f"{DISTRIBUTIONS[module]}, in the version that SGLang asks for). {INSTALL}"
            )


def _preferred(candidates: tuple[Backend, ...], demand: Demand, machine: Machine) -> str:
    """Return the first backend that fits, else the last, most general one, which will say why not."""
    asked = [backend for backend in candidates if not backend.by_name_alone]
    fit = [backend for backend in asked if not backend.unfit(demand, machine)]
    return (fit or asked[-1:])[0].name
