"""The entry of the CPU's operators, which keep every contract everywhere."""

from __future__ import annotations

from onpolicy.ops.backends.base import Backend
from onpolicy.ops.base import Operators


def _make(num_threads: int) -> Operators:
    from onpolicy.ops.cpu import CpuOperators

    return CpuOperators(num_threads)


CPU = Backend(name="cpu", make=_make, needs_gpu=False, engine_attention="sglang_patches.attention")
