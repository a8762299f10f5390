"""Every kernel the operators launch compiles for GPUs, and what the compiler made of it is sound."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).with_name("compile_kernels.py")

SHARED_MEMORY = {80: 99 << 10, 90: 227 << 10}
"""Bytes that a thread block can have. What is compiled for 8.0 must also run on 8.6 and 8.9, which
have the same tiles and less memory."""

FORWARD = {"_linear_kernel", "_grouped_linear_kernel", "_attention_kernel"}


@pytest.fixture(scope="module")
def compiled(request):
    """For each generation, what compile_kernels.py prints: both at a time, of kernels that changed."""
    cache = {"TRITON_CACHE_DIR": str(request.config.cache.mkdir("kernels"))}
    command = [sys.executable, SCRIPT, *map(str, SHARED_MEMORY)]
    done = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, **cache}, check=True)
    return dict(zip(SHARED_MEMORY, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_every_kernel_fits_into_shared_memory(compiled, arch):
    kernels = compiled[arch]
    assert {kernel["name"] for kernel in kernels} > FORWARD and len(kernels) > 30
    assert max(kernel["shared"] for kernel in kernels) <= SHARED_MEMORY[arch]


@pytest.mark.parametrize(
    ("arch", "instruction"), [(80, "mmax16x16"), (90, "wgmma.mma_asyncx64x16")]
)
def test_all_tiles_use_one_tensor_core_instruction(compiled, arch, instruction):
    """Which one a product takes must not depend on the number of rows: they may round differently."""
    for kernel in compiled[arch]:
        if kernel["name"] in FORWARD and kernel["dtype"] != "float32":
            assert kernel["instructions"] == [instruction], kernel


def test_float32_products_use_no_tensor_cores(compiled):
    kernels = [kernel for kernel in compiled[80] if kernel["dtype"] == "float32"]
    assert {kernel["name"] for kernel in kernels} >= FORWARD
    assert not any(kernel["instructions"] for kernel in kernels)


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_no_kernel_fuses_what_is_written_apart(compiled, arch):
    assert not any(kernel["fused"] for kernel in compiled[arch])


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("name", ["_query_grad_kernel", "_key_grad_kernel"])
def test_the_backward_pass_of_attention_copies_ahead(compiled, arch, name):
    """At the usual head sizes; those of 256 have no memory for it."""
    kernels = [k for k in compiled[arch] if k["name"] == name and k["dtype"] == "bfloat16"]
    assert sum(kernel["copies_ahead"] for kernel in kernels) >= 2
