"""Attention on Hopper GPUs by the kernels of SGLang's own `fa3` backend.

The operator calls FlashAttention-3 as this backend would (onpolicy/ops/hopper/flash_attention.py).
Settings that would make results depend on the batch are checked on the backend that SGLang built:
splits of a sequence (SGLang's heuristic unless inference is deterministic), another version or
another build of the kernels, page sizes with another tile, and other attention than multi-head.

Source: sglang/srt/layers/attention/flashattention_backend.py.
"""

from __future__ import annotations

from typing import Any

from onpolicy.errors import ContractError
from onpolicy.ops import Operators
from sglang_patches import paged_attention, registry

TARGET = f"{paged_attention.MODULE}.FlashAttentionBackend.__init__"

KERNELS = "sgl_kernel.flash_attn"
"""The module whose function the trainer calls; SGLang can also fetch a build from Hugging Face."""

WANTED = {"fa_impl_ver": 3, "num_splits": 1, "page_size": 1, "use_mla": False}


def install(operators: Operators) -> None:
    paged_attention.install(operators)
    registry.hook(TARGET, _require_exact, "after")


def _require_exact(_: None, backend: Any, *__: Any, **___: Any) -> None:
    for name, wanted in WANTED.items():
        require(name, getattr(backend, name), wanted)
    # From 0.5.21 on decoding has a number of its own.
    require("decode_num_splits", getattr(backend, "decode_num_splits", 1), 1)
    from sglang.kernels.ops.attention.flash_attention_v3 import _load_fa3_kernels

    loaded = _load_fa3_kernels()["flash_attn_with_kvcache"]
    require("kernels", loaded.__module__, KERNELS)


def require(name: str, found: object, wanted: object) -> None:
    """Raise ContractError unless SGLang's backend is set as the contract needs it."""
    if found != wanted:
        raise ContractError(
            f"FlashAttentionBackend.{name}={found!r}: must be {wanted!r}, or attention depends on the "
            "batch and is not the trainer's. Leave out the --sglang-* flags and SGLANG_* variables "
            "that set it."
        )
