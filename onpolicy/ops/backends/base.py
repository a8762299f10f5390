"""An entry of the registry of backends."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onpolicy.contract import OperatorShapes
from onpolicy.ops.base import Operators
from onpolicy.ops.machine import Machine

GEMM_COLUMNS = 16
"""Divisor of the out features of weights that DeepGEMM multiplies: its narrowest tile."""

FP8_BLOCK = 128
"""Output and input channels of a weight that share a scale in DeepGEMM's FP8 products."""

MAX_HEAD_DIM = 224
"""Largest head size that portable operators multiply in a known order: two of the blocks in which
MKL sums under MKL_CBWR=COMPATIBLE (`onpolicy/ops/portable.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A contract's requirements on its operators."""

    dtype: str
    shapes: OperatorShapes
    row_parallel_blocks: int


def _never(demand: Demand, machine: Machine) -> None:
    return None


def exact_float32() -> None:
    """Turn TF32 off for products outside the operators, such as positions times rotary frequencies."""
    torch.set_float32_matmul_precision("highest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One implementation of the operators. An entry imports no device library."""

    name: str
    """Name in the contract."""

    operators: str
    """`module:name` of the operators' class; the module imports the libraries that they need."""

    needs_gpu: bool = True

    unfit: Callable[[Demand, Machine], str | None] = _never
    """Reason why its kernels do not support this demand on such a machine, with the remedy; None if
    they do. Missing packages do not count."""

    by_name_alone: bool = False
    """Whether `--operators auto` never chooses it."""

    modules: tuple[str, ...] = ()
    """Modules that its kernels are imported from; keys of `machine.DISTRIBUTIONS`."""

    multiplies_bytes: bool = False
    """Whether linears that read rounded inputs multiply FP8 bytes (`ops/hopper/gemm.py`)."""

    engine_modules: tuple[str, ...] = ()
    """Further modules that SGLang imports to serve these operators; keys of `machine.DISTRIBUTIONS`."""

    engine_attention: str = ""
    """`module:name` of the plug-in's function that makes SGLang's attention use the operators."""

    def make(self, num_threads: int) -> Operators:
        """Return the operators, on a CPU with this number of threads."""
        kind: Callable[..., Operators] = pkgutil.resolve_name(self.operators)
        if not self.needs_gpu:
            return kind(num_threads)
        exact_float32()
        return kind()

    def refusal(self, demand: Demand, machine: Machine) -> str | None:
        """Return why `machine` cannot keep such a contract, and the remedy; None if it can."""
        return self.unfit(demand, machine) or machine.lacks(self.name, self.modules)
