"""Aligned operators of a backend, on a GPU or in a rehearsal."""

from __future__ import annotations

from functools import cache

from onpolicy.contract import NumericsContract, OperatorShapes
from onpolicy.ops import Operators
from tests.gpu.setting import Setting
from tests.support.gpu.operators import make_gpu_operators, make_part, missing, missing_part

PART_OF_FILE = {"test_gemm": "deep_gemm", "test_attention": "flash_attention_3"}
"""Files whose tests need one half of `hopper` alone."""


def obstacle(backend: str, file: str) -> str | None:
    """Return the name of what this machine lacks for a file's tests on a backend; None if nothing."""
    problem, part = missing(backend), PART_OF_FILE.get(file)
    return missing_part(part) if problem and part and backend == "hopper" else problem


def make_for(backend: str, file: str, setting: Setting) -> Operators:
    """Return the operators; for `hopper` the half that the file's tests need, if the other is
    missing."""
    if setting.device == "cuda" and missing(backend):
        return make_part(PART_OF_FILE[file])
    return make_backend(backend, setting)


@cache
def make_backend(backend: str, setting: Setting) -> Operators:
    """Return the operators; a rehearsal of `triton` runs its kernels in Triton's interpreter."""
    if setting.device == "cuda":
        return make_gpu_operators(backend)
    if backend == "triton":
        from onpolicy.ops.triton import TritonOperators

        return TritonOperators()
    from onpolicy.ops.cpu import CpuOperators

    return CpuOperators()


def make_contract(backend: str, setting: Setting, shapes: OperatorShapes) -> NumericsContract:
    """Return a contract for up to 8 tensor-parallel ranks."""
    return NumericsContract(
        backend=backend,
        device=setting.device,
        dtype="bfloat16",
        shapes=shapes,
        row_parallel_blocks=8,
    )
