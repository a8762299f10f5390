"""Which of the aligned operators a machine can keep.

Nothing here imports a GPU library: the registry's entries judge facts (`machine.py`).
"""

from __future__ import annotations

from onpolicy.contract import OperatorShapes
from onpolicy.errors import ConfigError
from onpolicy.ops.backends import BACKENDS, GPU_BACKENDS, Demand, backend_of
from onpolicy.ops.machine import Machine


def choose_backend(
    operators: str, dtype: str, shapes: OperatorShapes, row_parallel_blocks: int, machine: Machine
) -> str:
    """The contract's backend for `--operators`: auto, or one that needs a GPU.

    auto: without a GPU the first that needs none; with one the first whose kernels are made for this
    GPU and model. A package that is missing never changes the choice. Raises ConfigError if the machine
    cannot keep the backend.
    """
    if machine.capability is None:
        if operators != "auto":
            raise ConfigError(
                f"--operators={operators}: this machine has no GPU, and the CPU has operators of its "
                "own. Leave it out."
            )
        return next(backend.name for backend in BACKENDS if not backend.needs_gpu)
    demand = Demand(dtype=dtype, shapes=shapes, row_parallel_blocks=row_parallel_blocks)
    chosen = backend_of(_preferred(demand, machine) if operators == "auto" else operators)
    if problem := chosen.refusal(demand, machine):
        raise ConfigError(f"--operators={operators}: {problem}")
    return chosen.name


def _preferred(demand: Demand, machine: Machine) -> str:
    """The first that fits; else the last, the most general, which will say why it does not."""
    fit = [backend for backend in GPU_BACKENDS if not backend.unfit(demand, machine)]
    return (fit or GPU_BACKENDS[-1:])[0].name
