"""The aligned operators of a backend, on a GPU or in a rehearsal."""

from __future__ import annotations

from functools import cache

from onpolicy.contract import NumericsContract, OperatorShapes
from onpolicy.ops import Operators
from tests.gpu.setting import Setting
from tests.support.gpu.operators import make_gpu_operators


@cache
def make_backend(backend: str, setting: Setting) -> Operators:
    """The operators; a rehearsal of `triton` runs its kernels in Triton's interpreter."""
    if setting.device == "cuda":
        return make_gpu_operators(backend)
    if backend == "triton":
        from onpolicy.ops.triton import TritonOperators

        return TritonOperators()
    from onpolicy.ops.cpu import CpuOperators

    return CpuOperators()


def make_contract(backend: str, setting: Setting, shapes: OperatorShapes) -> NumericsContract:
    """A contract for up to 8 tensor-parallel ranks."""
    return NumericsContract(
        backend=backend,
        device=setting.device,
        dtype="bfloat16",
        shapes=shapes,
        row_parallel_blocks=8,
    )
