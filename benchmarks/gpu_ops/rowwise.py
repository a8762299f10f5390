"""Norms, activations, rotary embedding and log-probabilities: bound by memory bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from benchmarks.gpu_ops.cases import DEVICE, Aligned, Calls, Case, Goal, calls_of, normal, rotating
from tests.support.gpu.shapes import ModelShape

ROW_COUNTS = (1, 8, 32, 128, 1024, 8192)
MAX_LOGIT_ROWS = 1024
BANDWIDTH = Goal(0.9, "bandwidth")
BANDWIDTH_BYTES = 1 << 28
"""The size from which a call is bound by bandwidth; smaller calls are bound by latency."""
EPS = 1e-6

Operands = Callable[[int], tuple[Tensor, ...]]


def rowwise_cases(model: ModelShape) -> Iterator[Case]:
    for m in ROW_COUNTS:
        yield _rms_norm(model, m)
        yield _gated(model, m)
        yield _rotary(model, m)
        if m <= MAX_LOGIT_ROWS:
            yield _log_probs(model, m)
            yield _log_softmax(model, m)
            yield _sample(model, m)


def _case(
    operator: str,
    where: str,
    m: int,
    bytes_moved: float,
    operands: Operands,
    stock: tuple[str, Callable[..., object]],
    ours: Callable[..., object] | None = None,
) -> Case:
    """Return a case; `ours` takes the operators first, then the operands, and is by default their
    method of this name; `stock` is a name and a function."""

    def make(aligned: Aligned, l2_bytes: int) -> Calls:
        sets = rotating(operands, l2_bytes)
        functions = dict([stock])
        for backend, ops in aligned.items():
            functions[backend] = partial(ours, ops) if ours else getattr(ops, operator)
        return calls_of(functions, sets), len(sets)

    return Case(
        operator=operator,
        where=where,
        rows=m,
        flops=0.0,
        bytes=bytes_moved,
        goal=BANDWIDTH if bytes_moved >= BANDWIDTH_BYTES else None,
        make=make,
    )


def _rms_norm(model: ModelShape, m: int) -> Case:
    size = model.hidden

    def operands(i: int) -> tuple[Tensor, ...]:
        return normal(m, size, seed=i), normal(size, seed=1)

    stock = ("F.rms_norm", lambda x, weight: F.rms_norm(x, (size,), weight, EPS))
    return _case(
        "rms_norm", f"{model.name} {size}", m, 4.0 * m * size, operands, stock,
        lambda ops, x, weight: ops.rms_norm(x, weight, EPS),
    )  # fmt: skip


def _gated(model: ModelShape, m: int) -> Case:
    size = model.intermediate

    def operands(i: int) -> tuple[Tensor, ...]:
        return normal(m, size, seed=i), normal(m, size, seed=i + 1)

    stock = ("F.silu * up", lambda gate, up: F.silu(gate) * up)
    return _case(
        "gated", f"{model.name} {size}", m, 6.0 * m * size, operands, stock,
        lambda ops, gate, up: ops.gated(F.silu, gate, up),
    )  # fmt: skip


def _rotary(model: ModelShape, m: int) -> Case:
    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim

    def operands(i: int) -> tuple[Tensor, ...]:
        q, k = normal(1, m, heads, dim, seed=i), normal(1, m, kv_heads, dim, seed=i)
        cos, sin = normal(1, m, dim, seed=1), normal(1, m, dim, seed=2)
        return q.transpose(1, 2), k.transpose(1, 2), cos, sin

    where = f"{model.name} {heads}+{kv_heads} heads x {dim}"
    moved = 4.0 * m * (heads + kv_heads) * dim
    return _case("rotary", where, m, moved, operands, ("transformers", apply_rotary_pos_emb))


def _log_probs(model: ModelShape, m: int) -> Case:
    """Return the trainer's case: the log-probability of one token of every row."""

    def operands(i: int) -> tuple[Tensor, ...]:
        targets = torch.arange(m, device=DEVICE) * 131 % model.vocab
        return normal(m, model.vocab, seed=i), _temperature(m), targets

    def stock(logits: Tensor, temperature: Tensor, targets: Tensor) -> Tensor:
        return torch.log_softmax(logits.float() / temperature, -1).gather(1, targets[:, None])

    where, moved = f"{model.name} {model.vocab}", 2.0 * m * model.vocab
    named = ("log_softmax + gather", stock)
    return _case("gather_log_probs", where, m, moved, operands, named)


def _temperature(m: int) -> Tensor:
    return torch.full((m, 1), 0.7, device=DEVICE)


def _log_softmax(model: ModelShape, m: int) -> Case:
    """Return the rollout's case: the whole distribution, to sample from."""

    def operands(i: int) -> tuple[Tensor, ...]:
        return normal(m, model.vocab, seed=i), _temperature(m)

    def stock(logits: Tensor, temperature: Tensor) -> Tensor:
        return torch.log_softmax(logits.float() / temperature, -1)

    where, moved = f"{model.name} {model.vocab}", 6.0 * m * model.vocab
    return _case("log_softmax", where, m, moved, operands, ("torch.log_softmax", stock))


def _sample(model: ModelShape, m: int) -> Case:
    def operands(i: int) -> tuple[Tensor, ...]:
        log_probs = torch.log_softmax(normal(m, model.vocab, seed=i).float(), -1)
        return log_probs, torch.linspace(0.01, 0.99, m, dtype=torch.float64, device=DEVICE)

    def stock(log_probs: Tensor, uniform: Tensor) -> Tensor:
        return torch.multinomial(log_probs.exp(), 1)

    where, moved = f"{model.name} {model.vocab}", 4.0 * m * model.vocab
    return _case("sample", where, m, moved, operands, ("torch.multinomial", stock))
