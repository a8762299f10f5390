"""Slots of requests are zeros again when a server has taken its memory back.

CUDA graphs compute rows that no request asked for, and these read the slots of request 0, which nobody
writes: SGLang makes them as zeros. Memory that was given back holds whatever lay there in between, and
such a row then reads keys from anywhere: an illegal memory access, in one of 40 returns on an H100.
Source: sglang/srt/mem_cache/memory_pool.py (ReqToTokenPool). Can go when SGLang clears them itself.
"""

from __future__ import annotations

from typing import Any

from sglang_patches import registry

TARGET = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    ".resume_memory_occupation"
)


def install() -> None:
    registry.hook(TARGET, _clear_slots, "after")


def _clear_slots(result: Any, updater: Any, request: Any) -> Any:
    """Those of the cache, where that came back; no request has any then."""
    if not request.tags or "kv_cache" in request.tags:
        updater.tp_worker.model_runner.req_to_token_pool.req_to_token.zero_()
    return result
