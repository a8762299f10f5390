"""Puts the Triton attention into SGLang's `fa3` backend, in the place of FlashAttention-3.

The backend keeps what it is good at, page tables and the metadata of CUDA graphs, on all GPUs that the
Triton operators are made for (compute capability 8.0 to 9.0). The one function through which it
attends is replaced, and so is the precomputation for that function's scheduler, which knows no
float32. What the Triton attention does not compute is refused by name, not ignored.
Source: sglang/srt/layers/attention/flashattention_backend.py. Can go when a backend can be given an
attention function.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onpolicy.errors import ContractError
from sglang_patches import registry

MODULE = "sglang.srt.layers.attention.flashattention_backend"
ATTENTION_TARGET = f"{MODULE}.flash_attn_with_kvcache"
SCHEDULE_TARGET = f"{MODULE}.FlashAttentionBackend._compute_scheduler_metadata"

IRRELEVANT = {"cu_seqlens_k_new", "num_splits", "scheduler_metadata", "ver"}
"""Arguments about keys that are in the cache already, or about how FlashAttention-3 works."""


def install() -> None:
    registry.hook(ATTENTION_TARGET, flash_attn_with_kvcache, "replace")
    registry.hook(SCHEDULE_TARGET, _no_schedule, "replace")


def _no_schedule(*_: Any, **__: Any) -> None:
    """Without one, the backend hands none to the function above."""


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """FlashAttention-3's function, as far as its backend calls it for a decoder's own attention.

    q: [T, H, D]; k_cache: [pages, page size, H_kv, D]; v_cache: likewise with D_v. Rows of the
    result [T, H, D_v] after the last query of `cu_seqlens_q` are not written.
    """
    from onpolicy.ops.triton.attention import paged_attention

    asked = {name: value for name, value in others.items() if value is not None}
    asked |= {"causal": causal} if not causal else {}
    asked |= {"window_size": window_size} if tuple(window_size) != (-1, -1) else {}
    asked |= {"softcap": softcap} if softcap else {}
    asked |= {"return_softmax_lse": True} if return_softmax_lse else {}
    if refused := asked.keys() - IRRELEVANT:
        raise ContractError(
            f"attention with {', '.join(sorted(refused))}: has no aligned operator. Serve this model "
            "without --true-on-policy-mode, or leave out the --sglang-* flag that asks for it."
        )
    result, _ = paged_attention(
        q,
        k_cache,
        v_cache,
        page_table,
        cache_seqlens,
        cu_seqlens_q,
        max_seqlen_q,
        softmax_scale,
        k_cache.shape[1],
    )
    return result if out is None else out.copy_(result)
