"""One row of the benchmark: an operator at one size, its stock counterparts, and the goal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu_ops.timing import Call, num_sets
from onpolicy.ops import Operators

Aligned = Mapping[str, Operators]
"""The aligned operators by backend. Example: {"triton": ..., "hopper": ...}"""

Calls = tuple[dict[str, Call], int]
"""Calls by variant, and the number of operand sets they rotate through."""

Sets = list[tuple[Tensor, ...]]
"""Sets of operands of a call."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""A CPU is for rehearsals."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The speed that a row should reach."""

    fraction: float
    """Example: 0.95"""

    of: str
    """A stock variant whose speed is to be matched; or `bandwidth`."""

    def __str__(self) -> str:
        return f"{self.fraction:g} of {self.of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row: made before it is measured, with its operands freed after."""

    operator: str
    where: str
    """The model, the linear and its sizes. Example: 'Qwen3-4B down 2560x9728'"""

    rows: int
    """M: rows or tokens of the call."""

    flops: float
    bytes: float
    """Bytes that must be read and written at least once."""

    goal: Goal | None

    make: Callable[[Aligned, int], Calls]
    """A function from the aligned operators and the bytes of the L2 cache to the calls."""


def calls_of(functions: Mapping[str, Callable[..., object]], sets: Sets) -> dict[str, Call]:
    """Return each function as a call on the operands of a set, without autograd unless it enables
    it."""
    return {name: _call(function, sets) for name, function in functions.items()}


def _call(function: Callable[..., object], sets: Sets) -> Call:
    @torch.no_grad()
    def call(i: int) -> object:
        return function(*sets[i])

    return call


def rotating(make: Callable[[int], tuple[Tensor, ...]], l2_bytes: int) -> Sets:
    """Return as many sets of operands as it takes to exceed the cache; `make` gets the index of a
    set."""
    first = make(0)
    count = num_sets(sum(x.nbytes for x in first), l2_bytes)
    return [first, *(make(i) for i in range(1, count))]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return bfloat16 normal numbers on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    numbers = torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    return numbers.mul_(scale)
