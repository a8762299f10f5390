"""The entries of the registry of operator backends, for CPUs and for GPUs.

On a GPU Triton serves every model and dtype; four others are for Hopper.
"""

from __future__ import annotations

from dataclasses import replace

from onpolicy.contract import VARIABLES
from onpolicy.ops.backends.base import GEMM_COLUMNS, MAX_HEAD_DIM, Backend, Demand
from onpolicy.ops.machine import Machine

ENGINE_ATTENTION = "sglang_patches.cpu_attention:install"


CPU = Backend(
    name="cpu",
    operators="onpolicy.ops.cpu:CpuOperators",
    needs_gpu=False,
    engine_attention=ENGINE_ATTENTION,
)
"""Operators that keep every contract on every CPU."""


def _unfit_for_onednn(demand: Demand, machine: Machine) -> str | None:
    if demand.dtype != "bfloat16":
        return (
            f"dtype={demand.dtype}: oneDNN is asked for products of bfloat16 alone. Use "
            "--operators cpu, whose products are float32."
        )
    if not machine.bfloat16_products:
        return (
            "this CPU has no bfloat16 instructions (AVX512-BF16 or AMX), or ONEDNN_MAX_CPU_ISA hides "
            "them. Give --operators cpu for both engines: it needs none."
        )
    return None


ONEDNN = Backend(
    name="onednn",
    operators="onpolicy.ops.cpu:OnednnOperators",
    needs_gpu=False,
    unfit=_unfit_for_onednn,
    engine_attention=ENGINE_ATTENTION,
)
"""Operators with products by bfloat16 instructions, through oneDNN."""


def _other_variables(operators: str, machine: Machine) -> str | None:
    for name, value in VARIABLES[operators].items():
        asked = machine.asked_kernels.get(name)
        if asked != value:
            return (
                f"{name}={asked}: {operators} operators compute under {name}={value}. The commands of "
                f"onpolicy set it for --operators {operators}; let a process of your own begin with "
                f"onpolicy.compat.process.use_variables_of({operators!r}), or export it."
            )
    return None


def _unfit_for_portable(demand: Demand, machine: Machine) -> str | None:
    if problem := _other_variables("portable", machine):
        return problem
    if machine.cpu_kernels != "AVX2":
        return (
            f"PyTorch's kernels={machine.cpu_kernels}: portable operators need those for AVX2, which "
            "this processor does not have, or which were asked for after PyTorch had chosen others. "
            "Let the process begin with onpolicy.compat.process.use_variables_of('portable'), or give "
            "--operators cpu."
        )
    sizes = [max(x.head_dim, x.value_dim) for x in demand.shapes.attention]
    sizes += [max(x.key_dim, x.value_dim) for x in demand.shapes.delta]
    if unknown := [size for size in sizes if size > MAX_HEAD_DIM]:
        return (
            f"head_dim={unknown[0]}: the order in which MKL sums is known up to {MAX_HEAD_DIM} alone. "
            "Choose --operators cpu."
        )
    return None


PORTABLE = Backend(
    name="portable",
    operators="onpolicy.ops.portable:PortableOperators",
    needs_gpu=False,
    unfit=_unfit_for_portable,
    engine_attention=ENGINE_ATTENTION,
)
"""Operators with the same bits on every x86-64 processor that has AVX2."""


STOCK = Backend(name="stock", operators="onpolicy.ops.stock:StockOperators", needs_gpu=False)
"""PyTorch's own kernels, without any guarantee; each engine keeps its own attention."""

FLASH_HEAD_DIMS = (96, 128, 192, 256)
"""Head sizes for which FlashAttention-3 sums over keys in blocks of one width, however few queries
there are, with a page table (kernels of sglang-kernel 0.4.5 and 0.4.7). With 64 it uses blocks of
192 keys for few queries and of 128 for many; other sizes are padded to one of these."""

_OTHER = "Choose --operators triton."


def _unfit_for_triton(demand: Demand, machine: Machine) -> str | None:
    if machine.capability is None or not (8, 0) <= machine.capability <= (9, 0):
        return (
            f"compute capability={machine.capability_name}: triton operators are made for GPUs of "
            "8.0 (A100) to 9.0 (H100, H200). Use such a GPU, or run without --true-on-policy-mode."
        )
    if demand.dtype == "float16":
        return (
            "dtype=float16: no GPU has run these operators in it. Choose --dtype bfloat16 or float32, "
            "or run without --true-on-policy-mode."
        )
    return None


TRITON = Backend(
    name="triton",
    operators="onpolicy.ops.triton:TritonOperators",
    unfit=_unfit_for_triton,
    modules=("triton",),
    engine_modules=("sgl_kernel",),  # imported by its FlashAttention backend
    engine_attention="sglang_patches.paged_attention:install_triton",
)
"""Triton operators, for GPUs from Ampere to Hopper."""


def _unfit_for_deep_gemm(demand: Demand, machine: Machine) -> str | None:
    if machine.capability != (9, 0):
        return (
            f"compute capability={machine.capability_name}: Hopper's products are made for 9.0 (H100, "
            f"H200). {_OTHER}"
        )
    if demand.dtype != "bfloat16":
        return f"dtype={demand.dtype}: Hopper's products are of bfloat16 only. {_OTHER}"
    # Tensor parallelism shards columns; the parts must use the same kernel as the whole.
    blocks = demand.row_parallel_blocks
    multiple = GEMM_COLUMNS * blocks
    uneven = [n for n, _, _ in demand.shapes.linear if n % multiple] if blocks > 1 else []
    if uneven:
        return (
            f"out_features={uneven[0]}: up to {blocks} tensor-parallel ranks share Hopper's products in "
            f"multiples of {multiple}. Lower the degree, or choose --operators triton."
        )
    return None


DEEP_GEMM = replace(
    TRITON,
    name="deep_gemm",
    operators="onpolicy.ops.hopper:DeepGemmLinears",
    unfit=_unfit_for_deep_gemm,
    modules=("deep_gemm", "triton"),
    by_name_alone=True,
)
"""Triton operators with DeepGEMM's products, for head sizes that FlashAttention-3 does not support."""


def _unfit_for_hopper(demand: Demand, machine: Machine) -> str | None:
    if problem := _unfit_for_deep_gemm(demand, machine):
        return problem
    unfit = [x.head_dim for x in demand.shapes.attention if x.head_dim not in FLASH_HEAD_DIMS]
    if unfit:
        return (
            f"head_dim={unfit[0]}: FlashAttention-3 gives a query the same bits in every batch for head "
            f"sizes {', '.join(map(str, FLASH_HEAD_DIMS))} only. Choose --operators deep_gemm or triton."
        )
    return None


HOPPER = Backend(
    name="hopper",
    operators="onpolicy.ops.hopper:HopperOperators",
    unfit=_unfit_for_hopper,
    modules=("sgl_kernel", "deep_gemm", "triton"),
    engine_attention="sglang_patches.paged_attention:install_flash",
)
"""DeepGEMM and FlashAttention-3, for compute capability 9.0, bfloat16 and supported shapes."""


HOPPER_FP8 = replace(
    HOPPER,
    name="hopper_fp8",
    operators="onpolicy.ops.hopper:HopperFp8Operators",
    multiplies_bytes=True,
    by_name_alone=True,
)
"""The hopper backend with FP8 products; the caller, who knows the linears' names, checks their
shapes (`onpolicy/run/launch/contracts.py`)."""


def _unfit_for_cublaslt(demand: Demand, machine: Machine) -> str | None:
    return _unfit_for_hopper(demand, machine) or _other_variables("cublaslt", machine)


CUBLASLT = replace(
    HOPPER,
    name="cublaslt",
    operators="onpolicy.ops.hopper:CublasLtOperators",
    unfit=_unfit_for_cublaslt,
    modules=("sgl_kernel", "triton"),
    by_name_alone=True,  # no record of a GPU says that its rows are invariant
)
"""The hopper backend with cuBLASLt's products, which need no compiler."""
