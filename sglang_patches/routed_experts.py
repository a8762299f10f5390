"""Lets `--enable-return-routed-experts` run on a CPU.

SGLang keeps the experts of every token in host memory that it registers with the CUDA runtime, on a
CPU too, and fails there. Host memory needs no registration to be read by the host.
Source: sglang/srt/mem_cache/pool_host/common.py. Can go when the registration asks for the device.
"""

from __future__ import annotations

from typing import Any

from sglang_patches import registry

TARGET = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"


def install() -> None:
    registry.hook(TARGET, _leave_unregistered, "replace")


def _leave_unregistered(buffer: Any, *_: Any, **__: Any) -> None:
    """The buffer is ordinary host memory."""
