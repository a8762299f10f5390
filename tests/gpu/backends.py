"""Aligned operators of a backend, on a GPU or in a rehearsal."""

from functools import cache

from onpolicy.contract import NumericsContract
from onpolicy.ops.cpu import CpuOperators
from tests.support.gpu.operators import make_gpu_operators, make_part, missing, missing_part

PART_OF_FILE = {"test_gemm": "deep_gemm", "test_attention": "flash_attention_3"}
"""Files whose tests need one half of `hopper` alone."""


def obstacle(backend, file):
    """Return the name of what this machine lacks for a file's tests on a backend; None if nothing."""
    problem, part = missing(backend), PART_OF_FILE.get(file)
    return missing_part(part) if problem and part and backend == "hopper" else problem


def make_for(backend, file, setting):
    """Return the operators; for `hopper` the half that the file's tests need, if the other is
    missing."""
    if setting.device == "cuda" and missing(backend):
        return make_part(PART_OF_FILE[file])
    return make_backend(backend, setting)


@cache
def make_backend(backend, setting):
    return make_gpu_operators(backend) if setting.device == "cuda" else CpuOperators()


def make_contract(backend, setting, shapes):
    """Return a contract for up to 8 tensor-parallel ranks."""
    return NumericsContract(
        backend=backend,
        device=setting.device,
        dtype="bfloat16",
        shapes=shapes,
        row_parallel_blocks=8,
    )
