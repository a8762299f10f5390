"""The entry of the CPU's operators with products by bfloat16 instructions, as oneDNN has them."""

from __future__ import annotations

from onpolicy.ops.backends.base import Backend, Demand
from onpolicy.ops.base import Operators
from onpolicy.ops.machine import Machine


def _make(num_threads: int) -> Operators:
    import torch

    from onpolicy.ops.cpu import CpuOperators

    return CpuOperators(num_threads, torch.bfloat16)


def _unfit(demand: Demand, machine: Machine) -> str | None:
    if demand.dtype != "bfloat16":
        return (
            f"dtype={demand.dtype}: oneDNN is asked for products of bfloat16 alone. Use "
            "--operators cpu, which has the same float32."
        )
    if not machine.bfloat16_products:
        return (
            "this CPU has no bfloat16 instructions (AVX512-BF16 or AMX), or ONEDNN_MAX_CPU_ISA hides "
            "them. Give --operators cpu for both engines: it needs none."
        )
    return None


ONEDNN = Backend(
    name="onednn",
    make=_make,
    needs_gpu=False,
    unfit=_unfit,
    engine_attention="sglang_patches.attention",
)
