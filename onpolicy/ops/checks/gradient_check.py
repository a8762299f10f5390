"""The trainer's self-check that the gradients of a row are row-invariant too.

Only a trainer has a backward pass, so nothing here is compared with an engine. But gradients whose
bits depended on the rest of a micro-batch would also depend on the threads, which partition
sequences differently. A weight's gradient is a sum over all rows, and is the same for the same rows
in order.

Everything is checked in float32: the CPU operators sum in float32 whatever the dtype, and rounding
to bfloat16 would hide most differences. Linear is checked in the contract's dtype too, since
bfloat16 operands may be multiplied as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.contract import AttentionShape, NumericsContract
from onpolicy.ops.base import Operators
from onpolicy.ops.checks.delta_check import check_delta_gradients
from onpolicy.ops.checks.fixed_numbers import (
    ROWS,
    check_rows,
    columns_to_check,
    probe,
    require_equal,
)
from onpolicy.ops.checks.self_check import LENS, MAX_EXPERTS, AttentionInputs
from onpolicy.ops.layouts import AttentionLayout
from onpolicy.ops.mixture_of_experts import gated_halves, mix_experts
from onpolicy.ops.row_parallel import WHOLE, RowParallel

ROW_COUNTS = (1, *range(16, 257, 16), 299)
FEW_ROW_COUNTS = (1, 7, 64, 299)
"""Row counts for operators without a matrix product, and for experts, whose GEMMs have many sizes."""

FEW_ROWS = 16
"""Number of rows over the vocabulary for the entropy's gradient, which few runs use."""


def check_gradients(operators: Operators, contract: NumericsContract) -> None:
    """Raise ContractError that names the operator whose input gradient depends on the batch.

    Operators for GPUs promise the same gradient for the same batch, and are not checked.
    """
    if contract.device != "cpu":
        return
    shapes, row_parallel = contract.shapes, RowParallel(contract.row_parallel_blocks)
    for linears, how in ((shapes.linear, WHOLE), (shapes.row_linear, row_parallel)):
        for n, k, _ in linears:
            # A gradient has the columns of x: a whole tile and the last one stand for all.
            columns = columns_to_check(k // how.blocks, operators.column_tile) * how.blocks
            rows = operators.rows_per_chunk(n) if n == shapes.vocab_size else ROWS
            for dtype in {torch.float32, getattr(torch, contract.dtype)}:
                weight = probe(n, columns, seed=21).div_(n**0.5).to(dtype)
                linear = partial(
                    operators.row_parallel_linear, weight=weight, bias=None, row_parallel=how
                )
                _check("linear", (n, k), linear, columns, min(rows, ROWS), ROW_COUNTS, dtype)
    for size in shapes.norm:
        norm = partial(operators.rms_norm, weight=probe(size, seed=22), eps=1e-6)
        _check("rms_norm", (size,), norm, size)
    for size in shapes.layer_norm:
        weight, bias = probe(2, size, seed=22)
        layer_norm = partial(operators.layer_norm, weight=weight, bias=bias, eps=1e-5)
        _check("layer_norm", (size,), layer_norm, size)
    for function in (F.silu, F.gelu, torch.sigmoid, torch.tanh):
        _check(function.__name__, (37,), partial(operators.elementwise, function), 37)
    for sizes in shapes.experts:
        _check("softmax", sizes[:1], operators.softmax, sizes[0])
        _check_experts(operators, sizes, row_parallel)
    for kind in shapes.attention:
        _check_attention(operators, kind)
    for delta in shapes.delta:
        check_delta_gradients(operators, delta)
    _check_log_probs(operators, shapes.vocab_size)


def _gradient(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        (result,) = torch.autograd.grad(function(leaf), leaf, grad)
    return result


def _check(
    name: str,
    shape: tuple[int, ...],
    function: Callable[[Tensor], Tensor],
    size: int,
    rows: int = ROWS,
    counts: tuple[int, ...] = FEW_ROW_COUNTS,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Check the gradient of an operator on rows of `size` elements."""
    x = probe(rows, size, seed=23).to(dtype)
    with torch.no_grad():
        grad = probe(rows, function(x[:1]).shape[-1], seed=24).to(dtype)

    def of_rows(rows: Tensor) -> Tensor:
        return _gradient(function, x[rows], grad[rows])

    _check_rows(name, shape, of_rows, rows, counts)


def _check_rows(
    name: str,
    shape: tuple[int, ...],
    of_rows: Callable[[Tensor], Tensor],
    rows: int,
    counts: tuple[int, ...],
) -> None:
    counts = tuple(count for count in counts if count < rows)
    check_rows(f"gradient of {name}", shape, of_rows, torch.arange(rows), counts)


def _check_experts(
    operators: Operators, sizes: tuple[int, int, int, int], row_parallel: RowParallel
) -> None:
    """Check experts with a given choice; the router's gradient is checked as linear and softmax."""
    num_experts, intermediate, hidden, k = sizes
    few = min(num_experts, MAX_EXPERTS)
    gate_up = probe(few, 2 * intermediate, hidden, seed=25).div_(hidden**0.5)
    down = probe(few, hidden, intermediate, seed=26).div_(intermediate**0.5)
    x, grad = probe(ROWS, hidden, seed=27), probe(ROWS, hidden, seed=28)
    weights = probe(ROWS, k, seed=29)
    chosen = (torch.arange(ROWS)[:, None] + torch.arange(k)) % few

    gate = gated_halves(operators, F.silu)

    def of_rows(rows: Tensor) -> Tensor:
        def layer(x: Tensor) -> Tensor:
            return mix_experts(
                operators, x, chosen[rows], weights[rows], gate_up, down, gate, row_parallel
            )

        return _gradient(layer, x[rows], grad[rows])

    _check_rows("experts", sizes, of_rows, ROWS, FEW_ROW_COUNTS)


def _check_attention(operators: Operators, kind: AttentionShape) -> None:
    """Check the gradients of every sequence alone against the packed ones.

    A sink's gradient is a sum over all rows, and is not checked.
    """
    whole = AttentionInputs.of(kind, torch.float32, seed=30)
    grad = probe(sum(LENS), kind.heads, kind.value_dim, seed=34)

    def gradients(inputs: AttentionInputs, grad: Tensor, lens: tuple[int, ...]) -> list[Tensor]:
        q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        with torch.enable_grad():
            leaves = replace(inputs, q=q, k=k, v=v)
            out = leaves.attend(operators, AttentionLayout.packed(lens))
            return list(torch.autograd.grad(out, (q, k, v), grad))

    together = [x.split(LENS) for x in gradients(whole, grad, LENS)]
    for i, count in enumerate(LENS):
        q, k, v = (x.split(LENS)[i] for x in (whole.q, whole.k, whole.v))
        alone = gradients(replace(whole, q=q, k=k, v=v), grad.split(LENS)[i], (count,))
        for name, got, want in zip("qkv", alone, together, strict=True):
            case = f"{name} of a sequence of {count} alone"
            require_equal(f"gradient of {whole.name()}", whole.shape, case, got, want[i])


def _check_log_probs(operators: Operators, vocab_size: int) -> None:
    rows = min(ROWS, operators.rows_per_chunk(vocab_size))
    logits, grads = (
        4 * probe(rows, vocab_size, seed=34),
        [probe(rows, seed=35), probe(rows, seed=36)],
    )
    temperature, targets = torch.full((rows, 1), 0.7), torch.arange(rows) % vocab_size

    def gradient(rows: Tensor, given: Sequence[Tensor]) -> Tensor:
        where = logits[rows], temperature[rows], targets[rows]
        return operators.grad_logits(*where, *(grad[rows] for grad in given))

    of_rows, few = partial(gradient, given=grads[:1]), min(rows, FEW_ROWS)
    _check_rows("log_softmax", (vocab_size,), of_rows, rows, FEW_ROW_COUNTS)
    of_rows = partial(gradient, given=grads)
    _check_rows("log_softmax and entropy", (vocab_size,), of_rows, few, FEW_ROW_COUNTS)
