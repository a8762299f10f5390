"""Which operators a machine can keep, on recorded facts; refusals name the value and the remedy."""

import dataclasses
import inspect
import pkgutil
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
import torch

from onpolicy.config.groups import OperatorsConfig
from onpolicy.contract import (
    NO_SPLIT_K,
    PORTABLE_KERNELS,
    AttentionShape,
    DeltaShape,
    NumericsContract,
    OperatorShapes,
)
from onpolicy.errors import ConfigError, ContractError
from onpolicy.ops import make_operators
from onpolicy.ops.backends import (
    BACKENDS,
    CPU_BACKENDS,
    GPU_BACKENDS,
    Demand,
    backend_of,
    choose_backend,
    require_servable,
)
from onpolicy.ops.base import Operators
from onpolicy.ops.machine import ONEDNN_LIMITS, CudaToolkit, Machine

PACKAGES = {"triton": "3.6.0", "sgl_kernel": "0.4.5", "deep_gemm": "0.1.5.post1"}
CPU = Machine(capability=None, packages={"triton": "3.6.0"})
CPU_BFLOAT16 = dataclasses.replace(CPU, bfloat16_products=True)
CPU_PORTABLE = dataclasses.replace(CPU, cpu_kernels="AVX2", asked_kernels=PORTABLE_KERNELS)
H200 = Machine(capability=(9, 0), packages=PACKAGES, cuda_toolkit=CudaToolkit("/usr/local/cuda"))
H200_NO_SPLIT_K = dataclasses.replace(H200, asked_kernels=NO_SPLIT_K)
RUNTIME_ONLY = CudaToolkit(None, "/cuda has no executable bin/nvcc")
A100 = Machine(capability=(8, 0), packages=PACKAGES)
L40 = Machine(capability=(8, 9), packages=PACKAGES)
B200 = Machine(capability=(10, 0), packages=PACKAGES)


def attention(head_dim):
    return AttentionShape(heads=1, kv_heads=1, head_dim=head_dim, value_dim=head_dim)


def shapes(head_dim=128, vocabulary=151936):
    return OperatorShapes(
        linear=((4096, 2560, False), (vocabulary, 2560, False)),
        attention=(attention(head_dim),), norm=(), vocab_size=vocabulary,
    )  # fmt: skip


def without(machine, *modules):
    packages = {k: v for k, v in machine.packages.items() if k not in modules}
    return dataclasses.replace(machine, packages=packages)


@pytest.mark.parametrize(
    ("operators", "dtype", "head_dim", "machine", "backend"),
    [
        ("auto", "bfloat16", 128, CPU, "cpu"),
        ("auto", "bfloat16", 128, CPU_BFLOAT16, "onednn"),
        ("auto", "float32", 128, CPU_BFLOAT16, "cpu"),
        ("auto", "float16", 128, CPU_BFLOAT16, "cpu"),
        ("onednn", "bfloat16", 128, CPU_BFLOAT16, "onednn"),
        ("portable", "bfloat16", 128, CPU_PORTABLE, "portable"),
        ("auto", "bfloat16", 128, CPU_PORTABLE, "cpu"),
        ("auto", "bfloat16", 128, H200, "hopper"),
        ("auto", "bfloat16", 256, H200, "hopper"),
        ("auto", "bfloat16", 64, H200, "triton"),
        ("auto", "float32", 128, H200, "triton"),
        ("auto", "bfloat16", 128, A100, "triton"),
        ("auto", "bfloat16", 128, L40, "triton"),
        ("triton", "bfloat16", 128, H200, "triton"),
        ("hopper", "bfloat16", 128, H200, "hopper"),
        ("hopper_fp8", "bfloat16", 128, H200, "hopper_fp8"),
        ("deep_gemm", "bfloat16", 64, H200, "deep_gemm"),
        ("deep_gemm", "bfloat16", 128, without(H200, "sgl_kernel"), "deep_gemm"),
        ("auto", "bfloat16", 128, without(A100, "sgl_kernel", "deep_gemm"), "triton"),
        ("cublaslt", "bfloat16", 128, H200_NO_SPLIT_K, "cublaslt"),
        (
            "cublaslt", "bfloat16", 128,
            dataclasses.replace(without(H200_NO_SPLIT_K, "deep_gemm"), cuda_toolkit=RUNTIME_ONLY),
            "cublaslt",
        ),
        ("auto", "bfloat16", 128, H200_NO_SPLIT_K, "hopper"),
        ("auto", "bfloat16", 64, H200_NO_SPLIT_K, "triton"),
    ],
)  # fmt: skip
def test_the_choice(operators, dtype, head_dim, machine, backend):
    assert choose_backend(operators, dtype, shapes(head_dim), 1, machine) == backend


@pytest.mark.parametrize(
    ("machine", "head_dim", "backend"),
    [(CPU, 256, "cpu"), (A100, 256, "triton"), (H200, 256, "hopper"), (H200, 64, "triton")],
)
def test_every_device_has_the_gated_delta_rule(machine, head_dim, backend):
    kind = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel_size=4)
    hybrid = dataclasses.replace(shapes(head_dim), delta=(kind,))
    assert choose_backend("auto", "bfloat16", hybrid, 1, machine) == backend
    operators = pkgutil.resolve_name(backend_of(backend).operators)
    assert operators._delta_ways is not Operators._delta_ways


def test_a_matrix_whose_parts_deep_gemm_does_not_take_is_left_to_triton():
    odd = shapes(vocabulary=151664)  # 8 x 18958
    assert choose_backend("auto", "bfloat16", odd, 1, H200) == "hopper"
    assert choose_backend("auto", "bfloat16", odd, 4, H200) == "triton"
    assert choose_backend("auto", "bfloat16", shapes(), 8, H200) == "hopper"
    for operators in ("hopper", "cublaslt", "deep_gemm"):
        with pytest.raises(ConfigError, match=r"out_features=151664: .*multiples of 64.*triton"):
            choose_backend(operators, "bfloat16", odd, 4, H200_NO_SPLIT_K)


@pytest.mark.parametrize(
    ("operators", "dtype", "head_dim", "machine", "message"),
    [
        ("triton", "bfloat16", 128, CPU, r"--operators=triton: this machine has no GPU.*cpu or"),
        ("cpu", "bfloat16", 128, H200, r"--operators=cpu: this machine has a GPU.*hopper.* or triton"),
        ("onednn", "bfloat16", 128, CPU, r"no bfloat16 instructions.*--operators cpu"),
        ("onednn", "float32", 128, CPU_BFLOAT16, r"dtype=float32: .*--operators cpu"),
        ("onednn", "float16", 128, CPU_BFLOAT16, r"dtype=float16: .*--operators cpu"),
        ("auto", "float16", 128, H200, r"--operators=auto: dtype=float16: .*--dtype bfloat16 or"),
        ("hopper", "float16", 128, H200, r"dtype=float16: .*bfloat16 only"),
        ("portable", "bfloat16", 128, CPU, r"MKL_CBWR=None: .*COMPATIBLE.*use_variables_of"),
        (
            "portable", "bfloat16", 128, dataclasses.replace(CPU_PORTABLE, cpu_kernels="AVX512"),
            r"PyTorch's kernels=AVX512: .*AVX2.*--operators cpu",
        ),
        ("portable", "bfloat16", 256, CPU_PORTABLE, r"head_dim=256: .*224 alone.*--operators cpu"),
        ("hopper", "bfloat16", 128, A100, r"capability=8.0: .*9.0 \(H100.*--operators triton"),
        ("hopper", "float32", 128, H200, r"dtype=float32: .*bfloat16 only.*--operators triton"),
        ("hopper", "bfloat16", 64, H200, r"head_dim=64: .*96, 128, 192, 256 only.*deep_gemm or"),
        ("deep_gemm", "bfloat16", 128, A100, r"capability=8.0: .*9.0 \(H100.*--operators triton"),
        ("deep_gemm", "float32", 128, H200, r"dtype=float32: .*bfloat16 only.*--operators triton"),
        ("hopper_fp8", "bfloat16", 128, A100, r"capability=8.0: .*9.0 \(H100.*--operators triton"),
        ("cublaslt", "bfloat16", 128, CPU, r"--operators=cublaslt: this machine has no GPU.*cpu or"),
        ("cublaslt", "bfloat16", 128, A100, r"capability=8.0: .*9.0 \(H100.*--operators triton"),
        (
            "cublaslt", "bfloat16", 128, H200,
            r"CUBLAS_WORKSPACE_CONFIG=None: cublaslt .*=:16:8\. .*use_variables_of\('cublaslt'\)",
        ),
        (
            "cublaslt", "bfloat16", 128,
            dataclasses.replace(H200, asked_kernels={**NO_SPLIT_K, "CUBLASLT_WORKSPACE_SIZE": "0"}),
            r"CUBLASLT_WORKSPACE_SIZE=0: .*CUBLASLT_WORKSPACE_SIZE=1\. ",
        ),
        ("cublaslt", "bfloat16", 128, without(H200_NO_SPLIT_K, "sgl_kernel"), r"sgl_kernel is missing"),
        ("auto", "bfloat16", 128, B200, r"--operators=auto: compute capability=10.0: .*8.0.*9.0"),
        ("triton", "bfloat16", 128, B200, r"compute capability=10.0"),
        ("auto", "bfloat16", 128, without(H200, "deep_gemm"), r"deep_gemm .*sgl-deep-gemm.*\[gpu\]"),
        ("auto", "bfloat16", 128, without(H200, "sgl_kernel"), r"sgl_kernel .*package sglang-kernel"),
        (
            "auto", "bfloat16", 128,
            dataclasses.replace(H200, cuda_toolkit=RUNTIME_ONLY),
            r"--operators=auto: .*no CUDA toolkit.*deep_gemm.*\(/cuda has no executable bin/nvcc\).*"
            r"\[gpu\].*CUDA_HOME.*--operators triton",
        ),
        ("auto", "bfloat16", 128, without(A100, "triton"), r"triton is missing.*pip install"),
        (
            "triton", "bfloat16", 128,
            dataclasses.replace(A100, packages={"triton": "3.5.1"}), r"triton==3.5.1: .*3.6",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_with_a_remedy(operators, dtype, head_dim, machine, message):
    with pytest.raises(ConfigError, match=message):
        choose_backend(operators, dtype, shapes(head_dim), 1, machine)


@pytest.mark.parametrize("module", ["deep_gemm", "sgl_kernel"])
def test_a_missing_package_never_changes_the_choice(module):
    with pytest.raises(ConfigError, match=module):
        choose_backend("auto", "bfloat16", shapes(), 1, without(H200, module))


def test_a_package_without_metadata_counts_as_there():
    machine = dataclasses.replace(H200, packages=dict.fromkeys(PACKAGES, "unknown"))
    demand = Demand(dtype="bfloat16", shapes=shapes(), row_parallel_blocks=1)
    assert backend_of("hopper").refusal(demand, machine) is None


def test_this_machine_is_described_as_it_is():
    here = Machine.here()
    assert (here.capability is None) == (not torch.cuda.is_available())
    assert here.packages.keys() <= PACKAGES.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may keep these contracts")
@pytest.mark.parametrize("backend", ["triton", "hopper", "hopper_fp8", "cublaslt", "deep_gemm"])
def test_a_process_that_cannot_keep_its_contract_does_not_start(backend):
    contract = NumericsContract(backend=backend, device="cuda", dtype="bfloat16", shapes=shapes())
    with pytest.raises(ContractError, match=rf"backend={backend}: compute capability=none"):
        make_operators(contract)


def test_engines_with_products_of_another_library_exchange_no_token():
    made = {
        NumericsContract(
            backend=backend, device="cuda", dtype="bfloat16", shapes=shapes()
        ).fingerprint
        for backend in ("hopper", "cublaslt", "deep_gemm")
    }
    assert len(made) == 3


def test_an_unknown_backend_is_refused_by_name():
    contract = NumericsContract(backend="tpu", device="cpu", dtype="bfloat16", shapes=shapes())
    with pytest.raises(
        ContractError,
        match=r"backend='tpu'.*portable, hopper, hopper_fp8, cublaslt, deep_gemm, triton, stock.*ver",
    ):
        make_operators(contract)


def test_every_aligned_backend_can_be_asked_for():
    choices = get_args(get_type_hints(OperatorsConfig)["operators"])
    assert {*choices} == {"auto", *(backend.name for backend in (*CPU_BACKENDS, *GPU_BACKENDS))}


@pytest.mark.parametrize("name", ONEDNN_LIMITS)
def test_what_is_hidden_from_onednn_is_not_there(monkeypatch, name):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for limit in ONEDNN_LIMITS:
        monkeypatch.delenv(limit, raising=False)
    assert Machine.here().bfloat16_products
    for value, expected in {"avx512_core_bf16": True, "AVX512_CORE": False, "AVX2": False}.items():
        monkeypatch.setenv(name, value)
        assert Machine.here().bfloat16_products == expected


def test_an_engine_without_bfloat16_instructions_refuses_the_contract_of_one_with(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    contract = NumericsContract(backend="onednn", device="cpu", dtype="bfloat16", shapes=shapes())
    with pytest.raises(ContractError, match=r"backend=onednn: .*no bfloat16.*--operators cpu"):
        make_operators(contract)


def test_the_plugin_has_a_function_for_the_attention_of_every_aligned_backend():
    for backend in BACKENDS:
        is_aligned = NumericsContract(
            backend=backend.name, device="cpu", dtype="bfloat16", shapes=shapes()
        ).is_aligned
        assert bool(backend.engine_attention) == is_aligned
        if is_aligned:
            install = pkgutil.resolve_name(backend.engine_attention)
            assert [*inspect.signature(install).parameters] == ["operators"]


def test_the_registry_imports_no_library_of_a_device():
    script = """if True:
        import sys
        from onpolicy.contract import NumericsContract, OperatorShapes
        from onpolicy.ops import make_operators
        from onpolicy.ops.backends import choose_backend, require_servable
        shapes = OperatorShapes(linear=(), attention=(), norm=(), vocab_size=9)
        make_operators(NumericsContract(backend="cpu", device="cpu", dtype="float32", shapes=shapes))
        print(*{"triton", "sgl_kernel", "deep_gemm", "sglang", "transformers"} & {*sys.modules})
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize(("name", "ours"), [("attention_chunk", 512), ("flash_chunk", 2048)])
def test_operators_of_another_chunk_of_keys_are_refused(name, ours):
    contract = NumericsContract(
        backend="cpu", device="cpu", dtype="float32", shapes=shapes(), **{name: 1024}
    )
    with pytest.raises(ContractError, match=rf"{name}=1024.*{ours}"):
        make_operators(contract)


def test_a_server_of_triton_operators_is_refused_where_sglang_lacks_a_package():
    """The operators themselves run without it, in a trainer whose servers are elsewhere."""
    lacking = without(A100, "sgl_kernel")
    assert choose_backend("triton", "bfloat16", shapes(), 1, lacking) == "triton"
    with pytest.raises(
        ConfigError,
        match=r"operators=triton: sgl_kernel is missing.*package sglang-kernel.*\[gpu\]",
    ):
        require_servable("triton", lacking)
    for backend, machine in (("triton", A100), ("cpu", CPU), ("stock", CPU)):
        require_servable(backend, machine)
