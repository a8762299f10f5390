"""Every kernel the operators launch compiles for GPUs, and what the compiler made of it is sound.

The compiler takes most of a minute for each generation of GPUs, and makes the same of the same sources:
`make test-kernels` compiles, and `make test` asks whether it has passed with the sources as they are.
"""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from triton.runtime.autotuner import Autotuner, Heuristics

import onpolicy.ops.triton
import onpolicy.weights.xxh3_kernels
from tests.onpolicy.ops.triton.compile_kernels import overwrites
from tests.onpolicy.ops.triton.compiled_sources import RECORD, digest

SCRIPT = Path(__file__).with_name("compile_kernels.py")

SHARED_MEMORY = {80: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes that a thread block can have. What is compiled for 8.0 must also run on 8.6, which has the same
tiles and less memory."""

INSTRUCTION = {80: "mmax16x16", 89: "mmax16x16", 90: "wgmma.mma_asyncx64x16", 100: "tcgen05.mma"}

FORWARD = {"_linear_kernel", "_grouped_linear_kernel", "_attention_kernel"}

SPILLED = {
    ("_query_grad_kernel", "float32", "256"): 208,
    ("_attention_kernel", "bfloat16", "256"): 80,
    ("_chunks_kernel", "bfloat16", "256"): 120,
}
"""Bytes, by kernel, dtype and head size, where no tile that was tried keeps all in registers."""

SPILLED_ON_90 = 16
"""By what computes forward, for three blocks of keys on their way: four registers at head size 256."""

SPILLED_ON_100 = {
    ("_key_grad_kernel", "bfloat16", "128"): 8,
    ("_attention_kernel", "bfloat16", "256"): 128,
    ("_chunks_kernel", "bfloat16", "256"): 144,
}
"""Compute capability 10.0 is refused (`ops/backends/entries.py`)."""

COPIES_AHEAD = {"_query_grad_kernel": 2, "_key_grad_kernel": 1}
"""Kernels of the backward pass in bfloat16 that do, at least; at head size 256 they have no memory for
it, and gradients of keys have it at 64 alone."""

OUTPUT_TILE = {"ROWS", "COLUMNS", "num_warps", "num_stages", "BLOCKS"}
"""What a linear's number of rows may choose: which outputs, and blocks of K, share a thread block. INNER
decides a sum."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(arch, marks=pytest.mark.kernels) for arch in SHARED_MEMORY],
)
def arch(request):
    return request.param


@pytest.fixture(scope="module")
def compiled(request, arch):
    """What compile_kernels.py prints; kernels that have not changed are not compiled again."""
    cache = {"TRITON_CACHE_DIR": str(request.config.cache.mkdir("kernels"))}
    command = [sys.executable, SCRIPT, str(arch)]
    done = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, **cache}, check=True)
    return json.loads(done.stdout)[0]


def test_every_kernel_fits_into_shared_memory(compiled, arch):
    assert {kernel["name"] for kernel in compiled} > FORWARD and len(compiled) > 30
    assert max(kernel["shared"] for kernel in compiled) <= SHARED_MEMORY[arch]


def test_no_kernel_spills_but_those_that_are_named(compiled, arch):
    if arch == 90:
        assert max(k["stack"] for k in compiled if k["name"] in FORWARD) <= SPILLED_ON_90
    named = SPILLED | (SPILLED_ON_100 if arch == 100 else {})
    spilling = {
        (k["name"], k["dtype"], k["stack"], json.dumps(k["options"]))
        for k in compiled
        if k["stack"] > named.get((k["name"], k["dtype"], k["options"].get("DIM")), 0)
    }
    assert not spilling
    assert max(kernel["registers"] for kernel in compiled) > 100  # which are really read


def test_all_tiles_use_one_tensor_core_instruction(compiled, arch):
    """Which one a product takes must not depend on the number of rows: they may round differently."""
    for kernel in compiled:
        if kernel["name"] in FORWARD and kernel["dtype"] != "float32":
            assert kernel["instructions"] == [INSTRUCTION[arch]], kernel


def test_float32_products_use_no_tensor_cores(compiled, arch):
    if arch != 80:
        pytest.skip("float32 is compiled for 8.0, which stands for all")
    kernels = [kernel for kernel in compiled if kernel["dtype"] == "float32"]
    assert {kernel["name"] for kernel in kernels} >= FORWARD
    assert not any(kernel["instructions"] for kernel in kernels)


def test_no_kernel_fuses_what_is_written_apart(compiled):
    assert not any(kernel["fused"] for kernel in compiled)


def test_the_number_of_rows_chooses_nothing_that_decides_a_sum(compiled):
    """Each operator is launched with several numbers of rows; a linear's may choose its output tile."""
    chosen = defaultdict(set)
    for kernel in compiled:
        if kernel["name"] in FORWARD:
            free = OUTPUT_TILE if "linear" in kernel["name"] else set()
            shape = (
                kernel["dtype"], kernel["options"].get("DIM"), kernel["options"].get("PAGE_SIZE"),
            )  # fmt: skip
            special = kernel["options"].get("WINDOW"), kernel["options"].get("HAS_BIAS")
            deciding = tuple(sorted((k, v) for k, v in kernel["options"].items() if k not in free))
            chosen[kernel["name"], shape, special].add(deciding)
    assert chosen and all(len(settings) == 1 for settings in chosen.values()), chosen


def test_the_delta_rule_is_one_kernel_whatever_is_new_or_held(compiled):
    """Another kernel may distribute a sum over threads differently."""
    kernels = [k for k in compiled if k["name"] == "_delta_rule_kernel"]
    sizes = [(kernel["dtype"], kernel["options"]["DIM"]) for kernel in kernels]
    assert sizes and len(sizes) == len(set(sizes)), sizes


@pytest.mark.parametrize("name", COPIES_AHEAD)
def test_the_backward_pass_of_attention_copies_ahead(compiled, name):
    kernels = [k for k in compiled if k["name"] == name and k["dtype"] == "bfloat16"]
    assert sum(kernel["copies_ahead"] for kernel in kernels) >= COPIES_AHEAD[name]


def test_three_blocks_of_keys_are_on_their_way_on_hopper_while_one_is_multiplied(compiled, arch):
    """A loop that also reads the page table copies half as far ahead as it has stages."""
    if arch != 90:
        pytest.skip("others have less shared memory")
    kernels = [k for k in compiled if k["name"] in ("_attention_kernel", "_chunks_kernel")]
    assert len(kernels) > 5 and {kernel["slots"] for kernel in kernels} == {4}


def test_no_kernel_copies_over_what_a_product_still_reads(compiled):
    assert not [kernel for kernel in compiled if kernel["overwrites"]]


def test_a_tile_that_is_copied_over_too_early_is_seen():
    """Lines of `_key_grad_kernel` of 32 rows in two stages, whose gradients differed in every run."""
    product = "ttng.warp_group_dot_wait %key_total_180, %queries_177 {pendings = 3 : i32}"
    tile = "ttg.local_alloc : () -> !ttg.memdesc<{}x32x128xbf16, #shared1, #smem, mutable>"
    for slots, num_stages, expected in ((1, 2, True), (2, 3, True), (2, 2, False)):
        assert overwrites(f"{tile.format(slots)} {product}", num_stages) is expected
    assert not overwrites(f"{tile.format(1)} {product.replace('3', '0')}", 2)


def test_every_kernel_was_compiled_from_these_sources():
    assert RECORD.read_text().strip() == digest(), "run `make test-kernels` and commit its record"


def test_no_kernel_is_tuned_where_it_runs():
    """A timing would choose its tile, another on every machine."""
    found = pkgutil.walk_packages(onpolicy.ops.triton.__path__, "onpolicy.ops.triton.")
    modules = [importlib.import_module(module.name) for module in found]
    kernels = {
        name: value
        for module in (*modules, onpolicy.weights.xxh3_kernels)
        for name, value in vars(module).items()
        if name.endswith("_kernel")
    }
    assert kernels.keys() > FORWARD
    assert not any(isinstance(kernel, Autotuner | Heuristics) for kernel in kernels.values())
