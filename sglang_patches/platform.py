"""CPU platform for SGLang that needs no compiled kernels.

SGLang's own CPU engine imports `sgl_kernel`, which has no CPU wheel. As an out-of-tree platform,
every fused operator takes its native PyTorch path (`get_dispatch_key_name() == "native"`). It
serves both the aligned and the stock contract. Can go when sgl_kernel has a CPU wheel.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum

from sglang_patches import registry
from sglang_patches.head_sizes import head_sizes

NAME = "onpolicy_cpu"
ATTENTION_BACKEND = "torch_native"


def activate() -> str | None:
    """Return the platform's path if this process was told to use it, else None (entry point)."""
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        return None
    return f"{__name__}.OnPolicyCpuPlatform"


class OnPolicyCpuPlatform(CpuSRTPlatform):
    """A CPU on which SGLang runs PyTorch operators only."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"  # without it a profile that is asked for ends SGLang's scheduler

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def get_mha_kv_pool_cls(self) -> type:
        registry.require_active()  # every model process comes by here before it can serve
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        class Pool(MHATokenToKVPool):
            """A pool with its own size of values: SGLang gives an out-of-tree platform's pool the
            keys' size only."""

            def __init__(self, *args: Any, **kwargs: Any):
                contract = registry.contract()
                if contract.is_aligned:
                    kwargs = {"v_head_dim": head_sizes(contract)[1], **kwargs}
                super().__init__(*args, **kwargs)

        return Pool

    def get_paged_allocator_cls(self) -> type:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

        allocator: type = PagedTokenToKVPoolAllocator
        return allocator
