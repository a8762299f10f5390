"""The CPU backends: aligned on every CPU, by bfloat16 instructions, portable, and stock PyTorch."""

from __future__ import annotations

from onpolicy.contract import PORTABLE_KERNELS
from onpolicy.ops.backends.base import MAX_HEAD_DIM, Backend, Demand
from onpolicy.ops.base import Operators
from onpolicy.ops.machine import Machine

ENGINE_ATTENTION = "sglang_patches.attention:install"


def _make_cpu(num_threads: int) -> Operators:
    from onpolicy.ops.cpu import CpuOperators

    return CpuOperators(num_threads)


CPU = Backend(name="cpu", make=_make_cpu, needs_gpu=False, engine_attention=ENGINE_ATTENTION)
"""Operators that keep every contract on every CPU."""


def _make_onednn(num_threads: int) -> Operators:
    import torch

    from onpolicy.ops.cpu import CpuOperators

    return CpuOperators(num_threads, torch.bfloat16)


def _unfit_for_onednn(demand: Demand, machine: Machine) -> str | None:
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
    make=_make_onednn,
    needs_gpu=False,
    unfit=_unfit_for_onednn,
    engine_attention=ENGINE_ATTENTION,
)
"""Operators with products by bfloat16 instructions, through oneDNN."""


def _make_portable(num_threads: int) -> Operators:
    from onpolicy.ops.portable import PortableOperators

    return PortableOperators(num_threads)


def _unfit_for_portable(demand: Demand, machine: Machine) -> str | None:
    for name, value in PORTABLE_KERNELS.items():
        asked = machine.asked_kernels.get(name)
        if asked != value:
            return (
                f"{name}={asked}: portable operators compute under {name}={value}. The commands of "
                "onpolicy set it for --operators portable; let a process of your own begin with "
                "onpolicy.compat.process.use_portable_kernels(), or export it."
            )
    if machine.cpu_kernels != "AVX2":
        return (
            f"PyTorch's kernels={machine.cpu_kernels}: portable operators need those for AVX2, which "
            "this processor does not have, or which were asked for after PyTorch had chosen others. "
            "Let the process begin with onpolicy.compat.process.use_portable_kernels(), or give "
            "--operators cpu."
        )
    unknown = [
        max(x.head_dim, x.value_dim)
        for x in demand.shapes.attention
        if max(x.head_dim, x.value_dim) > MAX_HEAD_DIM
    ]
    if unknown:
        return (
            f"head_dim={unknown[0]}: the order in which MKL sums is known up to {MAX_HEAD_DIM} alone. "
            "Choose --operators cpu."
        )
    return None


PORTABLE = Backend(
    name="portable",
    make=_make_portable,
    needs_gpu=False,
    unfit=_unfit_for_portable,
    engine_attention=ENGINE_ATTENTION,
)
"""Operators with the same bits on every x86-64 processor that has AVX2."""


def _make_stock(num_threads: int) -> Operators:
    from onpolicy.ops.stock import StockOperators

    return StockOperators(num_threads)


STOCK = Backend(name="stock", make=_make_stock, needs_gpu=False)
"""PyTorch's own kernels, without any guarantee; each engine keeps its own attention."""
