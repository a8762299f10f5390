"""The Triton attention inside SGLang's `fa3` backend, in the place of FlashAttention-3.

It serves all GPUs that the Triton operators are made for (compute capability 8.0 to 9.0). The
precomputation for FlashAttention-3's scheduler is left out: it knows no float32.
Source: sglang/srt/layers/attention/flashattention_backend.py. Can go with paged_attention.py.
"""

from __future__ import annotations

from typing import Any

from onpolicy.ops import Operators
from sglang_patches import paged_attention, registry

SCHEDULE_TARGET = f"{paged_attention.MODULE}.FlashAttentionBackend._compute_scheduler_metadata"


def install(operators: Operators) -> None:
    paged_attention.install(operators)
    registry.hook(SCHEDULE_TARGET, _no_schedule, "replace")


def _no_schedule(*_: Any, **__: Any) -> None:
    """Without one, the backend hands none to the function that attends."""
