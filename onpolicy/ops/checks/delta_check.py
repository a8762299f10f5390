"""The start-up checks of the recurrent operators: whole sequences against the same ones in parts.

They run for models with gated delta networks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.contract import DeltaShape
from onpolicy.ops.base import Operators
from onpolicy.ops.checks.fixed_numbers import ROWS, Results, check_rows, probe, require_equal
from onpolicy.ops.recurrence import RecurrentLayout, state_rows

LENS = (150, 1, 64, 65, 17)
"""Lengths of the packed sequences; one has several chunks."""

ROUNDS = (33, *(1,) * 20, 7, 16, 60)
"""Most new tokens of every sequence in each call; a last call has all that are left."""

FEW_ROW_COUNTS = (1, 7, 64, 299)

Recurrent = Callable[[Sequence[Tensor], RecurrentLayout, Tensor | None], Tensor]
"""(inputs [T, ...], layout, states) -> [T, ...]."""


def check_delta(operators: Operators, kind: DeltaShape, dtype: torch.dtype, device: str) -> Results:
    """Check the operators of a gated delta network, and yield their results."""
    size = kind.value_heads, kind.value_dim
    steps = 4 * probe(ROWS, kind.value_heads, seed=40, device=device)
    for function in (F.softplus, torch.exp):
        name, apply = function.__name__, partial(operators.elementwise, function)
        yield name, size, check_rows(name, size, apply, steps, FEW_ROW_COUNTS)
    convolved, states = _convolution(operators, kind, dtype, device)
    yield "causal_conv", (kind.channels, kind.kernel_size), _check("causal_conv", convolved, states)
    ruled, states = _rule(operators, kind, dtype, device)
    yield "gated_delta", _sizes(kind), _check("gated_delta", ruled, states)


def check_delta_gradients(operators: Operators, kind: DeltaShape) -> None:
    """Check the gradients of every sequence alone against those of packed ones, in float32."""
    for name, make in (("causal_conv", _convolution), ("gated_delta", _rule)):
        (function, inputs), _ = make(operators, kind, torch.float32, "cpu")
        grad = probe(*function(inputs, RecurrentLayout.packed(LENS), None).shape, seed=41)

        def gradients(rows: slice, lens: tuple[int, ...]) -> tuple[Tensor, ...]:
            leaves = [x[rows].detach().requires_grad_() for x in inputs]  # noqa: B023
            with torch.enable_grad():
                out = function(leaves, RecurrentLayout.packed(lens), None)  # noqa: B023
            return torch.autograd.grad(out, leaves, grad[rows])  # noqa: B023

        together, first = gradients(slice(None), LENS), 0
        for count in LENS:
            rows = slice(first, first + count)
            for alone, whole in zip(gradients(rows, (count,)), together, strict=True):
                case = f"a sequence of {count} alone"
                require_equal(f"gradient of {name}", _sizes(kind), case, alone, whole[rows])
            first += count


Inputs = tuple[Recurrent, list[Tensor]]
"""An operator, and inputs of LENS tokens."""


def _sizes(kind: DeltaShape) -> tuple[int, ...]:
    return kind.key_heads, kind.value_heads, kind.key_dim, kind.value_dim


def _convolution(
    operators: Operators, kind: DeltaShape, dtype: torch.dtype, device: str
) -> tuple[Inputs, Tensor]:
    x = probe(sum(LENS), kind.channels, seed=42, device=device).to(dtype)
    weight = probe(kind.channels, kind.kernel_size, seed=43, device=device).to(dtype)

    def convolve(given: Sequence[Tensor], layout: RecurrentLayout, held: Tensor | None) -> Tensor:
        (x,) = given
        return operators.causal_conv(x, weight, None, layout, held)

    return (convolve, [x]), x.new_empty(len(LENS), kind.kernel_size - 1, kind.channels)


def _rule(
    operators: Operators, kind: DeltaShape, dtype: torch.dtype, device: str
) -> tuple[Inputs, Tensor]:
    tokens, values = sum(LENS), kind.value_heads
    keys = kind.key_heads, kind.key_dim
    q, k = (probe(tokens, *keys, seed=seed, device=device).to(dtype) for seed in (44, 45))
    v = probe(tokens, values, kind.value_dim, seed=46, device=device).to(dtype)
    g, beta = (probe(tokens, values, seed=seed, device=device).abs() for seed in (47, 48))

    def rule(given: Sequence[Tensor], layout: RecurrentLayout, held: Tensor | None) -> Tensor:
        q, k, v, g, beta = given
        return operators.gated_delta(q, k, v, g, beta, layout, held)

    rows = state_rows(kind.key_dim, kind.value_dim)
    states = g.new_empty(len(LENS), values, rows, kind.value_dim)
    return (rule, [q, k, v, -g / 4, beta.to(dtype)]), states


def _check(name: str, inputs: Inputs, states: Tensor) -> Tensor:
    """Check sequences that are fed in parts, several at a time, from states that held other numbers."""
    function, given = inputs
    whole = function(given, RecurrentLayout.packed(LENS), None)
    states.fill_(float("nan"))
    starts, done = [sum(LENS[:i]) for i in range(len(LENS))], [0] * len(LENS)
    for most in (*ROUNDS, max(LENS)):
        live = [i for i in reversed(range(len(LENS))) if done[i] < LENS[i]]
        counts = [min(most, LENS[i] - done[i]) for i in live]
        if not live:
            continue
        spans = [
            torch.arange(starts[i] + done[i], starts[i] + done[i] + n)
            for i, n in zip(live, counts, strict=True)
        ]
        rows = torch.cat(spans).to(whole.device)
        layout = RecurrentLayout(
            query_lens=tuple(counts),
            past_lens=tuple(done[i] for i in live),
            slots=torch.tensor(live, device=whole.device),
        )
        got = function([x[rows] for x in given], layout, states)
        case = f"{counts} tokens after {list(layout.past_lens)}"
        require_equal(name, tuple(whole.shape[1:]), case, got, whole[rows])
        for i, n in zip(live, counts, strict=True):
            done[i] += n
    return whole
