"""Attention against FlashAttention-3 as stock engines call it, and against PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_ops.cases import DEVICE, Aligned, Calls, Case, Goal, calls_of, normal, rotating
from onpolicy.ops import AttentionLayout, ScoreRule
from tests.support.gpu.paged_attention import (
    PagedBatch,
    flash_attention_3,
    paged_attention_of,
)
from tests.support.gpu.shapes import ModelShape

DECODING = ((1, 8192), (8, 1024), (8, 8192), (32, 2048), (128, 1024), (128, 4096))
"""(sequences, keys of each)"""
PACKED = ((1, 1024), (8, 1024), (1, 8192), (2, 8192))
"""(sequences, tokens of each)"""
PAGE_SIZES = (1, 64)


def attention_cases(model: ModelShape) -> Iterator[Case]:
    for sequences, length in DECODING:
        for page_size in PAGE_SIZES:
            yield _decoding(model, sequences, length, page_size)
    for sequences, length in PACKED:
        yield _training(model, sequences, length, backward=False)
        yield _training(model, sequences, length, backward=True)


def flash_attention_3_is_here(aligned: Aligned) -> bool:
    """Return whether FlashAttention-3 is installed: it comes with the hopper operators."""
    return "hopper" in aligned


def _where(model: ModelShape, sequences: int, length: int, what: str) -> str:
    heads = f"{model.heads}/{model.kv_heads} x {model.head_dim}"
    return f"{what}, {sequences} x {length}, heads {heads}"


def _decoding(model: ModelShape, sequences: int, length: int, page_size: int) -> Case:
    scale = model.head_dim**-0.5
    stores = (sequences * length, model.kv_heads, model.head_dim)

    def make(aligned: Aligned, l2_bytes: int) -> Calls:
        sets = rotating(
            lambda i: (
                normal(sequences, model.heads, model.head_dim, seed=i),
                normal(*stores, seed=i + 1),
                normal(*stores, seed=i + 2),
            ),
            l2_bytes,
        )
        pages = torch.randperm(stores[0] // page_size, device=DEVICE).view(sequences, -1)
        batch = PagedBatch.of(pages, page_size, [1] * sequences, [length] * sequences)
        functions: dict[str, Callable[..., object]] = {"SDPA": partial(_sdpa, sequences)}
        if flash_attention_3_is_here(aligned):
            functions["FA3"] = partial(flash_attention_3, batch=batch, scale=scale, num_splits=0)
        for backend in aligned:
            functions[backend] = partial(paged_attention_of(backend), batch=batch, scale=scale)
        return calls_of(functions, sets), len(sets)

    keys = float(sequences * length)
    return Case(
        operator="attention, decoding",
        where=_where(model, sequences, length, f"pages of {page_size}"),
        rows=sequences,
        flops=4.0 * keys * model.heads * model.head_dim,
        bytes=4.0 * keys * model.kv_heads * model.head_dim,
        goal=Goal(0.95, "FA3"),
        make=make,
    )


def _sdpa(sequences: int, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Compute PyTorch's attention over sequences of one length, without pages."""
    q, k, v = (x.view(sequences, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def _dense_flash_attention_3(
    q: Tensor, k: Tensor, v: Tensor, batch: PagedBatch, scale: float
) -> Tensor:
    """Compute FlashAttention-3 without a page table, as stock trainers call it."""
    from onpolicy.ops.hopper import flash_attention

    return flash_attention.loaded().flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=batch.cu_seqlens_q,
        cu_seqlens_k=batch.cu_seqlens_q,
        max_seqlen_q=batch.max_seqlen_q,
        max_seqlen_k=batch.max_seqlen_q,
        softmax_scale=scale,
        causal=True,
    )


@torch.enable_grad()
def _differentiated(function: Callable[..., Any], *inputs: Tensor) -> None:
    """Run forward and backward."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def _training(model: ModelShape, sequences: int, length: int, backward: bool) -> Case:
    scale, tokens = model.head_dim**-0.5, sequences * length

    def make(aligned: Aligned, l2_bytes: int) -> Calls:
        sets = rotating(
            lambda i: (
                normal(tokens, model.heads, model.head_dim, seed=i),
                normal(tokens, model.kv_heads, model.head_dim, seed=i + 1),
                normal(tokens, model.kv_heads, model.head_dim, seed=i + 2),
            ),
            l2_bytes,
        )
        layout = AttentionLayout.packed((length,) * sequences, DEVICE)
        batch = PagedBatch.of(layout.key_rows, 1, [length] * sequences, [length] * sequences)
        functions: dict[str, Callable[..., Any]] = {
            "SDPA": partial(_sdpa, sequences, is_causal=True)
        }
        for backend, ops in aligned.items():
            functions[backend] = partial(ops.attention, layout=layout, scores=ScoreRule(scale))
        if backward:
            functions = {name: partial(_differentiated, f) for name, f in functions.items()}
        elif flash_attention_3_is_here(aligned):
            paged = partial(flash_attention_3, batch=batch, scale=scale, num_splits=0)
            dense = partial(_dense_flash_attention_3, batch=batch, scale=scale)
            functions.update({"FA3": dense, "FA3 paged": paged})
        return calls_of(functions, sets), len(sets)

    pairs = sequences * length * (length + 1) / 2
    return Case(
        operator="attention, forward and backward" if backward else "attention, prefill",
        where=_where(model, sequences, length, "packed"),
        rows=tokens,
        flops=(14.0 if backward else 4.0) * pairs * model.heads * model.head_dim,
        bytes=4.0 * tokens * (model.heads + model.kv_heads) * model.head_dim,
        goal=None if backward else Goal(0.95, "FA3"),
        make=make,
    )
