"""The self-check of operators without a matrix product: each row is computed as if it were alone."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.contract import NumericsContract, OperatorShapes
from onpolicy.ops.base import Operators
from onpolicy.ops.checks.fixed_numbers import ROWS, Results, check_rows, probe, require_equal

FEW_ROW_COUNTS = (1, 2, 7, 64, 299)

WIDE_ROWS = 33
"""Number of rows for operators that hold many float64 numbers per row of the vocabulary."""

WIDE_ROW_COUNTS = (1, 2, 7)


def check_rowwise(operators: Operators, contract: NumericsContract) -> Results:
    """Check all of them at the contract's sizes, and yield their results."""
    dtype, shapes, device = getattr(torch, contract.dtype), contract.shapes, contract.device
    for size in shapes.norm:
        weight = probe(size, seed=1, device=device).to(dtype)
        x = probe(ROWS, size, seed=2, device=device).to(dtype)
        for name, round_last in (("rms_norm", False), ("rms_norm rounded last", True)):
            norm = partial(operators.rms_norm, weight=weight, eps=1e-6, round_last=round_last)
            yield name, (size,), check_rows(name, (size,), norm, x, FEW_ROW_COUNTS)
    for size in shapes.layer_norm:
        weight, bias = probe(2, size, seed=18, device=device).to(dtype)
        x = probe(ROWS, size, seed=19, device=device).to(dtype)
        norm = partial(operators.layer_norm, weight=weight, bias=bias, eps=1e-5)
        yield "layer_norm", (size,), check_rows("layer_norm", (size,), norm, x, FEW_ROW_COUNTS)
    x = 4 * probe(ROWS, 37, seed=3, device=device).to(dtype)
    for function in (F.silu, F.gelu, torch.sigmoid, torch.tanh):
        apply = partial(operators.elementwise, function)
        name = function.__name__
        yield name, (37,), check_rows(name, (37,), apply, x, FEW_ROW_COUNTS)
    yield "gated", (37,), _check_gated(operators, x)
    yield "add_scaled", (37,), _check_add_scaled(operators, x)
    for heads in sorted({(x.heads, x.kv_heads, x.head_dim) for x in shapes.attention}):
        if heads[2] % 2 == 0:  # no model rotates others
            yield "rotary", heads, _check_rotary(operators, heads, dtype, device)
    yield from _over_vocabulary(operators, shapes, dtype, device)


def _check_gated(operators: Operators, gate: Tensor) -> Tensor:
    """Check `gated` on the two halves of one tensor, as a linear leaves them."""
    up = probe(*gate.shape, seed=15, device=str(gate.device)).to(gate.dtype)

    def gated(both: Tensor) -> Tensor:
        return operators.gated(F.silu, *both.chunk(2, dim=-1))

    return check_rows("gated", (37,), gated, torch.cat((gate, up), dim=-1), FEW_ROW_COUNTS)


def _check_add_scaled(operators: Operators, out: Tensor) -> Tensor:
    """Check the addition of an adapter's result."""
    added = probe(*out.shape, seed=20, device=str(out.device)).to(out.dtype)

    def add_scaled(both: Tensor) -> Tensor:
        rows, others = both.chunk(2, dim=-1)
        return operators.add_scaled(rows, others, 0.3)

    both = torch.cat((out, added), dim=-1)
    return check_rows("add_scaled", (37,), add_scaled, both, FEW_ROW_COUNTS)


def _check_rotary(
    operators: Operators, heads: tuple[int, int, int], dtype: torch.dtype, device: str
) -> Tensor:
    """Check heads of queries and keys in a model's layout; a row is a token."""
    num_heads, kv_heads, dim = heads
    x = probe(ROWS, num_heads + kv_heads, dim, seed=16, device=device).to(dtype)
    angles = probe(2, ROWS, dim, seed=17, device=device).to(dtype)

    def rotary(tokens: Tensor) -> Tensor:
        q, k = x[tokens].transpose(0, 1)[None].split((num_heads, kv_heads), dim=1)
        rotated = operators.rotary(q, k, *angles[:, tokens].split(1))
        return torch.cat(rotated, dim=1)[0].transpose(0, 1)

    return check_rows("rotary", heads, rotary, torch.arange(ROWS, device=device), FEW_ROW_COUNTS)


def _over_vocabulary(
    operators: Operators, shapes: OperatorShapes, dtype: torch.dtype, device: str
) -> Results:
    size = (shapes.vocab_size,)
    logits = 4 * probe(ROWS, shapes.vocab_size, seed=4, device=device).to(dtype)
    yield "softmax", size, check_rows("softmax", size, operators.softmax, logits, FEW_ROW_COUNTS)

    def log_softmax(x: Tensor) -> Tensor:
        return operators.log_softmax(x, torch.full((len(x), 1), 0.7, device=device))

    log_probs = check_rows("log_softmax", size, log_softmax, logits, FEW_ROW_COUNTS)
    yield "log_softmax", size, log_probs
    rows = torch.arange(WIDE_ROWS, device=device)
    targets, uniform = rows * 7919 % size[0], (rows.double() + 0.5) / WIDE_ROWS

    def gather(rows: Tensor) -> Tensor:
        temperature = torch.full((len(rows), 1), 0.7, device=device)
        return operators.gather_log_probs(logits[rows], temperature, targets[rows])[0]

    chosen = check_rows("gather_log_probs", size, gather, rows, WIDE_ROW_COUNTS)
    want = log_probs[rows, targets]
    require_equal("gather_log_probs", size, "against log_softmax", chosen, want)
    yield "gather_log_probs", size, chosen

    def sample(rows: Tensor) -> Tensor:
        return operators.sample(log_probs[rows], uniform[rows])

    yield "sample", size, check_rows("sample", size, sample, rows, WIDE_ROW_COUNTS)
