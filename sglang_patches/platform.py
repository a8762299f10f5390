"""SGLang's platform for a CPU without compiled kernels, and corrections for CPUs and GPUs.

SGLang's own CPU engine imports `sgl_kernel`, which has no CPU wheel. As an out-of-tree platform,
every fused operator takes its native PyTorch path (`get_dispatch_key_name() == "native"`), in the
aligned and the stock contract. Can go when sgl_kernel has a CPU wheel.

Diverges in stock SGLang on a CPU, each until it asks for the device, or the backend, there:

- It rounds intermediate sizes up to a multiple of 32 for AMX kernels before it builds a model, and
  then cannot load the checkpoint (208 against 224). Here sizes stay as they are wherever tensor
  parallelism divides them. Source: sglang/srt/configs/update_config.py.
- It keeps the experts of every token (`--enable-return-routed-experts`) in host memory that it
  registers with the CUDA runtime, and fails. Source: sglang/srt/mem_cache/pool_host/common.py.
- It spawns a server's processes, and each imports SGLang, PyTorch and transformers anew, which is
  most of a start's time here. They are forked from the first, which has imported everything, except
  where a data-parallel controller starts them from threads. Source:
  sglang/srt/entrypoints/engine.py, which sets the method just before.
- For GPT-OSS and for Exaone-4 with windows it asks for another attention backend than
  `torch_native`, since that computes neither windows nor sinks. Ours, in its place, does, so these
  checks get the name of a backend that all of them accept. Source:
  sglang/srt/arg_groups/model_hook.py.
- Beside a torch that was built for CUDA it opens NCCL for tensor-parallel ranks, and fails. It gets
  the same answer as with a CPU build of torch. Source:
  sglang/srt/distributed/device_communicators/pynccl.py.

On a GPU it copies buffers and unmaps their source, and synchronises afterwards. A copy that is
still under way then ends in an illegal memory access, which killed a server on an H100 that eight
shared, in one of some 40 releases. Here it synchronises first.
Source: sglang/srt/managers/scheduler_components/weight_updater.py (`release_memory_occupation`),
pull request 37932 of sgl-project/sglang. Can go when the oldest supported SGLang does.
"""

from __future__ import annotations

import multiprocessing
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
            """A pool with values of their own size, and not the keys'."""

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


SIZES_TARGET = "sglang.srt.model_executor.model_runner.adjust_config_with_unaligned_cpu_tp"
REGISTER_TARGET = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
START_TARGET = "sglang.srt.entrypoints.engine._set_envs_and_config"
NCCL_TARGET = "sglang.srt.distributed.device_communicators.pynccl_wrapper.find_nccl_library"
CHECKS_TARGET = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"

ACCEPTED = {"attention_backend": "triton"}


def correct_for_cpu() -> None:
    registry.hook(SIZES_TARGET, _keep_config, "around")
    registry.hook(REGISTER_TARGET, _leave_unregistered, "replace")
    registry.hook(START_TARGET, _fork, "after")
    registry.hook(NCCL_TARGET, _find_no_nccl, "replace")


def accept_attention() -> None:
    """Have SGLang start every model with our attention."""
    registry.hook(CHECKS_TARGET, _as_if_accepted, "around")


def _keep_config(original: Any, model_config: Any, load_config: Any, tp_size: int) -> Any:
    divides = (
        model_config.num_attention_heads % tp_size == 0
        and model_config.get_total_num_kv_heads() % tp_size == 0
        and getattr(model_config.hf_text_config, "intermediate_size", 0) % tp_size == 0
    )
    return model_config if divides else original(model_config, load_config, tp_size)


def _leave_unregistered(buffer: Any, *_: Any, **__: Any) -> None:
    """Do nothing: the buffer is ordinary host memory."""


def _fork(_: Any, server_args: Any) -> None:
    if server_args.dp_size == 1:
        multiprocessing.set_start_method("fork", force=True)


def _find_no_nccl() -> str:
    raise ValueError("there is no NCCL for a CPU")


def _as_if_accepted(original: Any, *args: Any, **kwargs: Any) -> Any:
    # For these checks alone: elsewhere the name decides whether SGLang calls Triton.
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.arg_groups.overrides import ResolvedView

    resolved_view = model_hook.resolved_view
    model_hook.resolved_view = lambda args: ResolvedView(resolved_view(args), ACCEPTED)
    try:
        return original(*args, **kwargs)
    finally:
        model_hook.resolved_view = resolved_view


TARGET = "sglang.srt.utils.torch_memory_saver_adapter._TorchMemorySaverAdapterReal.pause"


def wait_before_release() -> None:
    registry.hook(TARGET, _wait, "before")


def _wait(*_: object) -> None:
    torch.cuda.synchronize()
