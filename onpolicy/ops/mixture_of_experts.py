"""A mixture-of-experts layer that computes every token as if it were alone.

Rows are sorted by expert, so that each expert is one GEMM of a row-invariant `grouped_linear`, and
then unsorted. A token's experts are added in the router's order, in float32, rounded once: neither
the other tokens of the batch nor the order in which experts run can change a bit. No step waits for
the device, so CUDA graphs can hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.ops.base import Operators
from onpolicy.ops.linears import Factors
from onpolicy.ops.row_parallel import WHOLE, RowParallel

Gate = Callable[[Tensor], Tensor]
"""The function between an expert's two products: [S, 2 I] -> [S, I]."""


class ExpertFactors(NamedTuple):
    """Adapters of all experts of a layer, in the layout of their weights: an axis of E first."""

    gate_up: Factors
    """a: [E, r, H]; b: [E, 2 I / P, r]"""

    down: Factors
    """a: [E, r, I / P]; b: [E, H, r]"""


def of_experts(numbers: Tensor, experts: Tensor) -> Tensor:
    """Return each row's entry of a table by expert: [E, N], int64 [S] -> float32 [S, N].

    Gradients are summed in float32.
    """
    return F.embedding(experts, numbers.float())


def gated_halves(operators: Operators, activation: Callable[[Tensor], Tensor]) -> Gate:
    """Return the usual gate, `activation(gate) * up`, for rows that hold gate before up."""
    return lambda gate_up: operators.gated(activation, *gate_up.chunk(2, dim=-1))


def mix_experts(
    operators: Operators,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: Gate,
    row_parallel: RowParallel,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    adapter: ExpertFactors | None = None,
    in_few_kernels: bool = True,
) -> Tensor:
    """Compute `sum_j weights[:, j] * down[e_j](gate(gate_up[e_j](x)))`, e = experts.

    x: [T, H]; experts: int64 [T, k]; weights: [T, k]; gate_up: [E, 2 I, H] and bias [E, 2 I]; down:
    [E, H, I] and bias [E, H].
    Return [T, H] in the dtype of `x`. With P tensor-parallel ranks, every rank holds I / P of the
    intermediate axis of all experts, and the whole `down_bias`. `adapter` adds to both products as
    `add_low_rank` does to a linear; to the second before anything is rounded. `in_few_kernels`:
    whether `Operators.mix_few` may be used, if no gradient is needed.
    """
    has_biases = gate_up_bias is not None or down_bias is not None
    has_more = has_biases or adapter is not None
    is_plain = not (torch.is_grad_enabled() or has_more) and row_parallel.blocks == 1
    if in_few_kernels and is_plain:
        mixed = operators.mix_few(x, experts, weights, gate_up, down, gate)
        if mixed is not None:
            return mixed
    # The general way: repeat rows per expert, sort them, compute, unsort, and mix.
    tokens, k = experts.shape
    rows, chosen = x[:, None].expand(-1, k, -1).reshape(tokens * k, -1), experts.reshape(-1)
    outputs = expert_outputs(
        operators, rows, chosen, gate_up, down, gate, row_parallel, adapter, gate_up_bias
    )
    # These are the same on every rank, so they are added once, outside the sum over ranks.
    once = [] if adapter is None else [outputs.pop()]
    if down_bias is not None:
        once.append(of_experts(down_bias, chosen))
    mixed = mix_outputs(outputs, weights, row_parallel)
    for output in once:
        mixed = mixed + mix_outputs([output], weights, WHOLE)
    return mixed.to(x.dtype)


def expert_outputs(
    operators: Operators,
    rows: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: Gate,
    row_parallel: RowParallel,
    adapter: ExpertFactors | None = None,
    gate_up_bias: Tensor | None = None,
) -> list[Tensor]:
    """Return the expert's output for each row, in this rank's blocks of the sum over I.

    rows: [S, H]; experts: int64 [S]; other arguments as in `mix_experts`.
    Return float32 [S, H] each. If there is an `adapter`, its addition to the sum over all blocks
    comes last, the same on every rank.
    """
    by_expert = SortedRows.of(experts, len(gate_up))
    rows, offsets = rows[by_expert.order], by_expert.offsets
    if gate_up_bias is None:
        product = operators.grouped_linear(rows, gate_up, offsets)
    else:
        sums = operators.grouped_partial_linear(rows, gate_up, offsets)
        product = (sums + of_experts(gate_up_bias, by_expert.experts)).to(rows.dtype)
    if adapter is not None:  # as `add_low_rank`
        a, b, scale = adapter.gate_up
        added = operators.grouped_linear(operators.grouped_linear(rows, a, offsets), b, offsets)
        product = operators.add_scaled(product, added, scale)
    hidden = gate(product)
    outputs = _in_blocks(operators, hidden, down, offsets, row_parallel)
    if adapter is not None:
        a, b, scale = adapter.down
        parts = _in_blocks(operators, hidden, a, offsets, row_parallel)
        inner = row_parallel.sum(parts).to(hidden.dtype)
        outputs.append(operators.grouped_linear(inner, b, offsets).float() * scale)
    return [output[by_expert.back] for output in outputs]


def _in_blocks(
    operators: Operators, hidden: Tensor, weight: Tensor, offsets: Tensor, row_parallel: RowParallel
) -> list[Tensor]:
    """Compute the products of this rank's blocks of I: sorted [S, I / P], [E, N, I / P] -> [S, N]."""
    pairs = zip(row_parallel.split(hidden), row_parallel.split(weight), strict=True)
    return [operators.grouped_partial_linear(*pair, offsets) for pair in pairs]


class SortedRows(NamedTuple):
    """The order of rows by their experts, and its inverse."""

    experts: Tensor
    """int64 [S], ascending"""

    order: Tensor
    back: Tensor
    offsets: Tensor
    """int64 [E + 1]: start of each expert's rows"""

    @staticmethod
    def of(experts: Tensor, count: int) -> SortedRows:
        chosen, order = experts.sort(stable=True)
        offsets = torch.searchsorted(chosen, torch.arange(count + 1, device=experts.device))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=experts.device)
        return SortedRows(chosen, order, back, offsets)


def mix_outputs(outputs: Sequence[Tensor], weights: Tensor, row_parallel: RowParallel) -> Tensor:
    """Add up a token's experts in the router's order, then the blocks of all ranks.

    outputs: float32 [T * k, H] for each of this rank's blocks; weights: [T, k] -> float32 [T, H].
    """

    def mixed(output: Tensor) -> Tensor:
        by_token = output.view(*weights.shape, output.shape[-1])
        parts = (by_token * weights.float()[..., None]).unbind(1)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    return row_parallel.sum([mixed(output) for output in outputs])
