"""The entry of the Hopper operators: compute capability 9.0, bfloat16, and shapes its kernels fit."""

from __future__ import annotations

from onpolicy.ops.backends.base import Backend, Demand
from onpolicy.ops.backends.hopper_limits import FLASH_HEAD_DIMS, GEMM_COLUMNS
from onpolicy.ops.backends.triton import exact_float32
from onpolicy.ops.base import Operators
from onpolicy.ops.machine import Machine

_OTHER = "Choose --operators triton."


def _make(num_threads: int) -> Operators:
    from onpolicy.ops.hopper import HopperOperators

    exact_float32()
    return HopperOperators()


def _unfit(demand: Demand, machine: Machine) -> str | None:
    shapes, blocks = demand.shapes, demand.row_parallel_blocks
    if machine.capability != (9, 0):
        return (
            f"compute capability={machine.capability_name}: hopper operators are made for 9.0 (H100, "
            f"H200). {_OTHER}"
        )
    if demand.dtype != "bfloat16":
        return f"dtype={demand.dtype}: hopper operators compute in bfloat16 only. {_OTHER}"
    unfit = [x.head_dim for x in shapes.attention if x.head_dim not in FLASH_HEAD_DIMS]
    if unfit:
        return (
            f"head_dim={unfit[0]}: FlashAttention-3 gives a query the same bits in every "
            f"batch for head sizes {', '.join(map(str, FLASH_HEAD_DIMS))} only. {_OTHER}"
        )
    # Tensor parallelism shares out columns; the parts must take the kernel that the whole takes.
    multiple = GEMM_COLUMNS * blocks
    uneven = [n for n, _, _ in shapes.linear if n % multiple] if blocks > 1 else []
    if uneven:
        return (
            f"out_features={uneven[0]}: with up to {blocks} tensor-parallel ranks DeepGEMM needs "
            f"multiples of {multiple}. Lower the degree, or choose --operators triton."
        )
    return None


HOPPER = Backend(
    name="hopper",
    make=_make,
    unfit=_unfit,
    modules=("sgl_kernel", "deep_gemm", "triton"),
    engine_attention="sglang_patches.flash_attention",
)
