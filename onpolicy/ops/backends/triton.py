"""The entry of the Triton operators: GPUs from Ampere to Hopper, every model and dtype."""

from __future__ import annotations

import torch

from onpolicy.ops.backends.base import Backend, Demand
from onpolicy.ops.base import Operators
from onpolicy.ops.machine import Machine


def exact_float32() -> None:
    """For what no operator stands for, such as the product of positions and rotary frequencies."""
    torch.set_float32_matmul_precision("highest")


def _make(num_threads: int) -> Operators:
    from onpolicy.ops.triton import TritonOperators

    exact_float32()
    return TritonOperators()


def _unfit(demand: Demand, machine: Machine) -> str | None:
    if machine.capability is None or not (8, 0) <= machine.capability <= (9, 0):
        return (
            f"compute capability={machine.capability_name}: triton operators are made for GPUs of "
            "8.0 (A100) to 9.0 (H100, H200). Use such a GPU, or run without --true-on-policy-mode."
        )
    return None


TRITON = Backend(
    name="triton",
    make=_make,
    unfit=_unfit,
    modules=("triton",),
    engine_modules=("sgl_kernel",),  # its FlashAttention backend does
    engine_attention="sglang_patches.triton_attention",
)
