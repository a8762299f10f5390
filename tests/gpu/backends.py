"""The aligned operators of a backend, without a contract of a model."""

from __future__ import annotations

from functools import cache

from gpu.setting import Setting

from onpolicy.contract import NumericsContract, OperatorShapes
from onpolicy.ops import Operators, make_operators
from onpolicy.ops.capability import Machine, refusal

BACKENDS = ("triton", "hopper")

NO_SHAPES = OperatorShapes(linear=(), heads=32, kv_heads=8, head_dim=128, norm=(), vocab_size=1024)
"""For operators of no model in particular; the head size decides whether a backend serves it."""


def missing(backend: str, dtype: str = "bfloat16") -> str | None:
    """What this GPU lacks for the backend, by name; None if nothing."""
    return refusal(backend, dtype, NO_SHAPES.head_dim, Machine.here())


@cache
def make_backend(backend: str, setting: Setting) -> Operators:
    """The operators; a rehearsal of `triton` runs its kernels in Triton's interpreter."""
    if backend == "triton" and setting.device == "cpu":
        from onpolicy.ops.triton import TritonOperators

        return TritonOperators()
    return make_operators(make_contract(backend, setting, NO_SHAPES))


def make_contract(backend: str, setting: Setting, shapes: OperatorShapes) -> NumericsContract:
    return NumericsContract(
        backend=backend,
        device=setting.device,
        dtype="bfloat16",
        shapes=shapes,
        row_parallel_blocks=8,
    )
