"""What an entry of the registry of backends says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onpolicy.contract import OperatorShapes
from onpolicy.ops.base import Operators
from onpolicy.ops.machine import Machine

GEMM_COLUMNS = 16
"""DeepGEMM multiplies by weights whose out features are a multiple of this, its narrowest tile."""

FP8_BLOCK = 128
"""Output and input channels of a weight that share a scale in DeepGEMM's products of bytes."""

MAX_HEAD_DIM = 224
"""Numbers of a query, key or value that portable operators multiply in a known order: two of the blocks
in which MKL sums under MKL_CBWR=COMPATIBLE (`onpolicy/ops/portable.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a contract asks of its operators."""

    dtype: str
    shapes: OperatorShapes
    row_parallel_blocks: int


def _never(demand: Demand, machine: Machine) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One implementation of the operators. An entry imports no library of a device."""

    name: str
    """What a contract calls it."""

    make: Callable[[int], Operators]
    """From a number of CPU threads; imports what the operators need."""

    needs_gpu: bool = True

    unfit: Callable[[Demand, Machine], str | None] = _never
    """Why its kernels do not compute this on such a machine, and what to do; None if they do. Says
    nothing of packages."""

    by_name_alone: bool = False
    """Whether `--operators auto` leaves it out."""

    modules: tuple[str, ...] = ()
    """What its kernels are imported from; of `machine.DISTRIBUTIONS`."""

    multiplies_bytes: bool = False
    """Whether linears that read rounded inputs multiply bytes (`ops/hopper/fp8.py`)."""

    engine_modules: tuple[str, ...] = ()
    """What SGLang imports besides, whose server runs these operators; of `machine.DISTRIBUTIONS`."""

    engine_attention: str = ""
    """`module:name` of the plug-in's function that has SGLang attend by the operators it is given."""

    def refusal(self, demand: Demand, machine: Machine) -> str | None:
        """Why `machine` cannot keep a contract of this backend, and what to do; None if it can."""
        return self.unfit(demand, machine) or machine.lacks(self.name, self.modules)
