"""FlashAttention-3 with gradients, by the function that SGLang's `fa3` backend calls.

SGLang reads keys through a page table in prefill and in decode, so training does too, with pages of
one key. All three then run the same compiled kernels, whose sums over keys go in blocks of one
width per head size (`FLASH_HEAD_DIMS`). Contiguous keys would use kernels with other widths for
some head sizes and lengths; they would only save the gathering of keys by cp.async. With
`num_splits=1` the kernels never cut a sequence; long ones are cut here (`key_chunks.py`).

The forward's library has no backward pass. Upstream's FlashAttention-3 is used where it is
installed and can be deterministic, else the FlashAttention-2 inside PyTorch. They need not agree
with the rollout, which computes no gradients, and so are not part of the contract.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from onpolicy.errors import ContractError
from onpolicy.ops.differentiable_attention import Gradients
from onpolicy.ops.hopper.key_chunks import attend_in_chunks, is_cut
from onpolicy.ops.layouts import AttentionLayout, PagedLayout, ScoreRule, starts_of
from onpolicy.ops.triton.attention_backward import attention_backward

UPSTREAM = "flash_attn_interface"
"""Upstream's module, which registers torch.ops.flash_attn_3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedKeys:
    """The keys of S sequences laid end to end, on the device that computes."""

    rows: Tensor
    """int64 [keys of all sequences]: row of the key/value store that holds each key, in order."""

    starts: Tensor
    """int32 [S + 1]: first key of each sequence."""

    @staticmethod
    def of(layout: AttentionLayout) -> PackedKeys:
        """Return the packed keys of `layout`, computed once for all layers of a model."""
        if PackedKeys not in layout.plans:
            rows = layout.key_rows
            is_key = torch.arange(rows.shape[1]) < torch.tensor(layout.key_lens)[:, None]
            layout.plans[PackedKeys] = PackedKeys(
                rows=rows[is_key.to(rows.device)], starts=starts_of(layout.key_lens).to(rows.device)
            )
        keys: PackedKeys = layout.plans[PackedKeys]
        return keys


@cache
def has_upstream() -> bool:
    """Return whether upstream's FlashAttention-3 is installed.

    Raise ContractError if it cannot be loaded.
    """
    if importlib.util.find_spec(UPSTREAM) is None:
        return False
    try:
        importlib.import_module(UPSTREAM)
    except (ImportError, OSError, RuntimeError) as error:
        raise ContractError(
            f"{UPSTREAM}: installed, but cannot be loaded with torch {torch.__version__} ({error}). "
            "Build it for this version, or uninstall it: PyTorch's own backward pass is used then."
        ) from error
    return True


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: AttentionLayout,
    scores: ScoreRule,
) -> Gradients:
    """Return the gradients of q, k and v, as `differentiable_attention` asks; lse: float32 [H, T]."""
    if scores.softcap:  # PyTorch's backward pass has no soft cap
        by_row = lse.t().contiguous()
        return attention_backward(grad, q, k, v, out, by_row, layout, scores)
    rows = PackedKeys.of(layout).rows
    packed = grad.contiguous(), q, k[rows], v[rows], out, lse
    dq, dk, dv = packed_backward(packed, layout, scores)
    grad_k = torch.zeros_like(k).index_copy_(0, rows, dk)
    grad_v = torch.zeros_like(v).index_copy_(0, rows, dv)
    return dq, grad_k, grad_v


def packed_backward(
    tensors: tuple[Tensor, ...], layout: AttentionLayout, scores: ScoreRule
) -> Gradients:
    """Return the gradients of q [T, H, D], k [keys, H_kv, D] and v [keys, H_kv, D].

    tensors: grad [T, H, D], q, k and v, whose keys are laid end to end, sequence after sequence,
    out [T, H, D], and lse, float32 [H, T].
    """
    q, k, v = tensors[1:4]
    starts = layout.by_pages().query_starts, PackedKeys.of(layout).starts
    longest = max(layout.query_lens), max(layout.key_lens)
    # Upstream has no deterministic kernel for head size 256.
    if q.shape[-1] < 256 and has_upstream():
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn_3.bwd(
            *tensors,
            *grads,
            *starts,
            max_seqlen_q=longest[0],
            max_seqlen_k=longest[1],
            softmax_scale=scores.scale,
            is_causal=True,
            **_window(scores),
            deterministic=True,
        )
        return grads
    with _deterministic_algorithms():
        gradients: Gradients = torch.ops.aten._flash_attention_backward(
            *tensors,
            *starts,
            *longest,
            dropout_p=0.0,
            is_causal=True,
            rng_state=torch.zeros(2, dtype=torch.uint64, device=q.device),
            unused=torch.empty(0, device=q.device),
            scale=scores.scale,
            **_window(scores),
        )
        return gradients


def _window(scores: ScoreRule) -> dict[str, int]:
    """Return the window as the keys before a query's own and after it, as both libraries count."""
    if scores.window is None:
        return {}
    return {"window_size_left": scores.window - 1, "window_size_right": 0}


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    """Forbid atomic additions in PyTorch's kernel, which checks only this switch."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)


@cache
def loaded() -> ModuleType:
    """Load the module `sgl_kernel.flash_attn`, or raise ContractError."""
    try:
        from sgl_kernel import flash_attn
    except (ImportError, OSError, RuntimeError) as error:
        raise ContractError(
            f"sgl_kernel.flash_attn: cannot be loaded with torch {torch.__version__} ({error}). "
            "Install the version of sglang-kernel that the installed SGLang asks for (pip install "
            "-e '.[gpu]'), or choose --operators triton."
        ) from error
    module: ModuleType = flash_attn
    return module


def fits(q: Tensor, v: Tensor, scores: ScoreRule) -> bool:
    """Return whether its kernels give this layer the same bits in every batch; q: [T, H, D].

    With a window, the widest heads get blocks of 64 keys, and of 80 once the page table is no wider
    than the window (tile_size.h, flash_api.cpp). The scaling of sinks and heads of two sizes are
    untested.
    """
    is_plain = scores.sinks is None and v.shape[-1] == q.shape[-1]
    return is_plain and not (scores.window and q.shape[-1] > 192)


def int32_pages(layout: AttentionLayout) -> PagedLayout:
    """Return `layout.by_pages()` with int32 page numbers, cached for all layers of a model."""
    if int32_pages not in layout.plans:
        pages = layout.by_pages()
        table = pages.page_table.to(torch.int32)
        layout.plans[int32_pages] = replace(pages, page_table=table)
    found: PagedLayout = layout.plans[int32_pages]
    return found


def forward(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scores: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Compute causal attention: returns [T, H, D_v] and the log of the normaliser, float32 [H, T].

    q: [T, H, D]; k: [rows, H_kv, D]; v: [rows, H_kv, D_v]. bfloat16, no sinks (`fits`), no autograd.
    """
    return attend(q, k[:, None], v[:, None], int32_pages(layout), scores)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PagedLayout,
    scores: ScoreRule,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `forward` over pages: k [pages, page size, H_kv, D]; v likewise with D_v."""

    def with_lse(q: Tensor, layout: PagedLayout, **how: Any) -> tuple[Tensor, Tensor]:
        result, lse, *_ = _call(q, k, v, layout, scores, return_softmax_lse=True, **how)
        return result, lse

    if is_cut(layout, scores):
        return attend_in_chunks(with_lse, q, layout, out)
    return with_lse(q, layout)


def over_pages(
    q: Tensor, k: Tensor, v: Tensor, layout: PagedLayout, scores: ScoreRule, out: Tensor | None
) -> Tensor:
    """Compute attention for the rollout engine, with the arguments of SGLang's backend.

    The shapes are as in `Operators.paged_attention`; `layout.schedule` may hold
    `scheduler_metadata` and `cu_seqlens_k_new`, which calls over chunks do not take.
    """
    if is_cut(layout, scores):
        return attend(q, k, v, layout, scores, out)[0]
    buffer: dict[str, Any] = {} if out is None else {"out": out}
    result: Tensor = _call(q, k, v, layout, scores, **buffer)
    return result


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PagedLayout,
    scores: ScoreRule,
    causal: bool = True,
    **more: Any,
) -> Any:
    how: dict[str, Any] = {"softmax_scale": scores.scale, "causal": causal}
    how |= {"window_size": (scores.window - 1, 0)} if scores.window else {}
    how |= {"softcap": scores.softcap} if scores.softcap else {}
    return loaded().flash_attn_with_kvcache(
        q=q,
        k_cache=k,
        v_cache=v,
        cache_seqlens=layout.key_lens,
        page_table=layout.page_table,
        cu_seqlens_q=layout.query_starts,
        max_seqlen_q=layout.max_query_len,
        num_splits=1,
        **how,
        **layout.schedule,
        **more,
    )
