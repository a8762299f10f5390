"""`Operators.paged_attention` in SGLang's `fa3` backend, on every GPU.

Diverges in stock SGLang: the backend attends through one function, FlashAttention-3's, which is
replaced. The backend keeps its page tables and the metadata of CUDA graphs. Arguments that the
operator does not support are refused by name, not ignored.

On Hopper GPUs the operator may call FlashAttention-3 itself, as this backend would
(onpolicy/ops/hopper/flash_attention.py). Then settings that would make results depend on the batch
are checked on the backend that SGLang built: splits of a sequence (SGLang's heuristic unless
inference is deterministic), another version or another build of the kernels, page sizes with
another tile, and other attention than multi-head.

Source: sglang/srt/layers/attention/flashattention_backend.py. Can go when a backend can be given an
attention function.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onpolicy.errors import ContractError
from onpolicy.ops import Operators, PagedLayout, ScoreRule
from sglang_patches import registry

MODULE = "sglang.srt.layers.attention.flashattention_backend"
TARGET = f"{MODULE}.flash_attn_with_kvcache"
SCHEDULE_TARGET = f"{MODULE}.FlashAttentionBackend._compute_scheduler_metadata"

SCHEDULE = {"cu_seqlens_k_new", "scheduler_metadata"}
"""Arguments for FlashAttention-3's scheduling, which its own operator passes on."""

IRRELEVANT = {"num_splits", "ver"}
"""Arguments without effect: the operators have one way each."""


def install(operators: Operators) -> None:
    def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Tensor:
        return attend(operators, *args, **kwargs)

    registry.hook(TARGET, flash_attn_with_kvcache, "replace")


def install_triton(operators: Operators) -> None:
    """Install without the precomputation for FlashAttention-3's scheduler: it has no float32."""
    install(operators)
    registry.hook(SCHEDULE_TARGET, _no_schedule, "replace")


def _no_schedule(*_: Any, **__: Any) -> None:
    """Return no schedule, so the backend passes none to the attention function."""


def attend(
    operators: Operators,
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
    sinks: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Compute FlashAttention-3's function, as its backend calls it for a decoder's own attention.

    q: [T, H, D]; k_cache: [pages, page size, H_kv, D]; v_cache: likewise with D_v; window_size:
    visible keys before a query's own, and after it, or -1 and -1; sinks: [H]. Rows of the result
    [T, H, D_v] after the last query of `cu_seqlens_q` are not written.
    """
    asked = {name: value for name, value in others.items() if value is not None}
    asked |= {"causal": causal} if not causal else {}
    before, after = window_size
    asked |= {"window_size": window_size} if before > -1 and after != 0 else {}
    asked |= {"return_softmax_lse": True} if return_softmax_lse else {}
    if refused := asked.keys() - SCHEDULE - IRRELEVANT:
        raise ContractError(
            f"attention with {', '.join(sorted(refused))}: has no aligned operator. Serve this model "
            "without --true-on-policy-mode, or leave out the --sglang-* flag that asks for it."
        )
    layout = PagedLayout(
        page_table=page_table,
        page_size=k_cache.shape[1],
        key_lens=cache_seqlens,
        query_starts=cu_seqlens_q,
        max_query_len=max_seqlen_q,
        schedule={name: asked[name] for name in sorted(SCHEDULE & asked.keys())},
    )
    scores = ScoreRule(softmax_scale, (before + 1) or None, softcap or None, sinks)
    return operators.paged_attention(q, k_cache, v_cache, layout, scores, out)


FLASH_TARGET = f"{MODULE}.FlashAttentionBackend.__init__"

KERNELS = "sgl_kernel.flash_attn"
"""The module whose function the trainer calls; SGLang can also fetch a build from Hugging Face."""

WANTED = {"fa_impl_ver": 3, "num_splits": 1, "page_size": 1, "use_mla": False}


def install_flash(operators: Operators) -> None:
    install(operators)
    registry.hook(FLASH_TARGET, _require_exact, "after")


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
