"""The entry of the CPU's operators made to have the same bits on every x86-64 processor with AVX2."""

from __future__ import annotations

from onpolicy.contract import PORTABLE_KERNELS
from onpolicy.ops.backends.base import Backend, Demand
from onpolicy.ops.backends.portable_limits import MAX_HEAD_DIM
from onpolicy.ops.base import Operators
from onpolicy.ops.machine import Machine


def _make(num_threads: int) -> Operators:
    from onpolicy.ops.portable import PortableOperators

    return PortableOperators(num_threads)


def _unfit(demand: Demand, machine: Machine) -> str | None:
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
    make=_make,
    needs_gpu=False,
    unfit=_unfit,
    engine_attention="sglang_patches.attention",
)
