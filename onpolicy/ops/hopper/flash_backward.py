"""FlashAttention's backward pass over packed keys, from the forward's output and log-sum-exp.

The forward's library has none. Upstream's FlashAttention-3 is used where it is installed and can be
deterministic, else the FlashAttention-2 inside PyTorch. They need not agree with the rollout, which
computes no gradients, and so are not part of the contract.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from onpolicy.errors import ContractError
from onpolicy.ops.layouts import AttentionLayout, ScoreRule, starts_of

UPSTREAM = "flash_attn_interface"
"""Upstream's module, which registers torch.ops.flash_attn_3."""

Grads = tuple[Tensor, Tensor, Tensor]


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
                rows=rows[is_key.to(rows.device)],
                starts=starts_of(layout.key_lens).to(rows.device),
            )
        keys: PackedKeys = layout.plans[PackedKeys]
        return keys


def backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    layout: AttentionLayout,
    scores: ScoreRule,
) -> Grads:
    """Return the gradients of `inputs` = (q [T, H, D], k [keys, H_kv, D], v [keys, H_kv, D]).

    Keys are laid end to end, sequence after sequence. out, grad: [T, H, D]; lse: float32 [H, T];
    the scores have no soft cap.
    """
    q, k, v = inputs
    # Upstream has no deterministic kernel for head size 256.
    run = flash_attention_3 if q.shape[-1] < 256 and has_upstream() else flash_attention_2
    return run(grad.contiguous(), q, k, v, out, lse, layout, scores)


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


def flash_attention_3(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: AttentionLayout,
    scores: ScoreRule,
) -> Grads:
    """Return the gradients by upstream's library; see `backward`."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    torch.ops.flash_attn_3.bwd(
        dout=grad,
        q=q,
        k=k,
        v=v,
        out=out,
        softmax_lse=lse,
        dq=dq,
        dk=dk,
        dv=dv,
        cu_seqlens_q=layout.by_pages().query_starts,
        cu_seqlens_k=PackedKeys.of(layout).starts,
        max_seqlen_q=max(layout.query_lens),
        max_seqlen_k=max(layout.key_lens),
        softmax_scale=scores.scale,
        is_causal=True,
        **_window(scores),
        deterministic=True,
    )
    return dq, dk, dv


def flash_attention_2(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: AttentionLayout,
    scores: ScoreRule,
) -> Grads:
    """Return the gradients by PyTorch; see `backward`."""
    with _deterministic_algorithms():
        gradients: Grads = torch.ops.aten._flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            layout.by_pages().query_starts,
            PackedKeys.of(layout).starts,
            max(layout.query_lens),
            max(layout.key_lens),
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
