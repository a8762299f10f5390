"""A few layers of a real model: one decoding step in a CUDA graph, and one training step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config

from benchmarks.gpu_ops.attention import flash_attention_3_is_here
from benchmarks.gpu_ops.cases import DEVICE, Aligned, Calls, Case
from benchmarks.gpu_ops.timing import Call
from onpolicy.models.policy import PackedTokens, PolicyModel
from onpolicy.ops import AttentionLayout, Operators, Scores
from onpolicy.ops.stock import StockOperators
from tests.support.gpu.paged_attention import (
    PagedAttention,
    PagedBatch,
    flash_attention_3,
    paged_attention_of,
)
from tests.support.gpu.paged_model import DecodeGraph, PagedModel, random_policy
from tests.support.gpu.shapes import ModelShape

LAYERS = 4
CONTEXT = 1024
PAGE_SIZE = 64
DECODING = (1, 32, 128)
"""Sequences that decode at once."""
PACKED = (8, 1024)
"""Sequences of a training step, and tokens of each."""


def model_cases(model: ModelShape) -> Iterator[Case]:
    for sequences in DECODING:
        yield _decoding(model, sequences)
    yield _training(model)


class _StockTrainer(StockOperators):
    """Stock operators that know that the benchmark's sequences are all of one length."""

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: AttentionLayout,
        scores: Scores,
        sinks: Tensor | None = None,
    ) -> Tensor:
        sequences = len(layout.key_lens)
        q, k, v = (x.view(sequences, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scores.scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)


def _policy(model: ModelShape, operators: Operators) -> PolicyModel:
    config = Qwen3Config(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=LAYERS,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        tie_word_embeddings=True,
    )
    return random_policy(config, operators, torch.bfloat16, DEVICE)


def _stock_attention(aligned: Aligned) -> tuple[str, PagedAttention]:
    """FlashAttention-3 with free splits, or else the aligned one: then only the rest is stock."""

    def free(
        q: Tensor, k: Tensor, v: Tensor, batch: PagedBatch, scale: float
    ) -> tuple[Tensor, Tensor]:
        return flash_attention_3(q, k, v, batch, scale, num_splits=0)

    if flash_attention_3_is_here(aligned):
        return "stock, FA3", free
    return "stock, aligned attention", paged_attention_of("triton")


def _decoding(model: ModelShape, sequences: int) -> Case:
    def make(aligned: Aligned, l2_bytes: int) -> Calls:
        name, attention = _stock_attention(aligned)
        engines: dict[str, tuple[Operators, PagedAttention]] = {name: (StockOperators(), attention)}
        for backend, ops in aligned.items():
            engines[backend] = (ops, paged_attention_of(backend))
        calls = {}
        for engine, (ops, attention) in engines.items():
            paged = PagedModel(_policy(model, ops), attention, sequences, CONTEXT, PAGE_SIZE)
            calls[engine] = _replays(DecodeGraph(paged, sequences))
        return calls, 1

    return _case(
        model, "decoding step in a CUDA graph", f"{sequences} x {CONTEXT}", sequences, make
    )


def _replays(graph: DecodeGraph) -> Call:
    graph.lens.fill_(CONTEXT)
    return lambda _: graph.replay()


def _training(model: ModelShape) -> Case:
    sequences, length = PACKED

    def make(aligned: Aligned, l2_bytes: int) -> Calls:
        rng = random.Random(0)
        tokens = [[rng.randrange(model.vocab) for _ in range(length)] for _ in range(sequences)]
        batch = PackedTokens.pack(tokens, [1] * sequences, 1.0, DEVICE)
        trainers = {"stock": _StockTrainer(), **aligned}
        return {
            name: _training_step(_policy(model, ops), batch) for name, ops in trainers.items()
        }, 1

    where = f"{sequences} x {length}"
    return _case(model, "training step", where, sequences * length, make, passes=6.0)


def _training_step(policy: PolicyModel, batch: PackedTokens) -> Call:
    """Forward, backward and AdamW; at a learning rate of 0, so that every step is the same."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, fused=True)

    def step(_: int) -> None:
        log_probs, _entropy = policy(batch)
        log_probs.mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _case(
    model: ModelShape,
    operator: str,
    where: str,
    tokens: int,
    make: Callable[[Aligned, int], Calls],
    passes: float = 2.0,
) -> Case:
    shapes = model.linears()
    layer = shapes["q"], shapes["kv"], shapes["kv"], shapes["o"], *3 * [shapes["gate_up"]]
    weights = sum(n * k for n, k in layer) * LAYERS + model.vocab * model.hidden
    return Case(
        operator=operator,
        where=f"{LAYERS} layers of {model.name}, {where}",
        rows=tokens,
        flops=passes * weights * tokens,
        bytes=2.0 * weights,
        goal=None,
        make=make,
    )
