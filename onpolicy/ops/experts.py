"""A mixture-of-experts layer whose every token is computed as if it were alone.

Rows are sorted by expert, so that each expert is one GEMM of a row-invariant `grouped_linear`, and
put back. A token's experts are added in the router's order, in float32, rounded once: neither the
other tokens of the batch nor the order in which experts run can change a bit. No step waits for the
device, so CUDA graphs can hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.ops.base import Operators
from onpolicy.ops.row_parallel import WHOLE, RowParallel

Gate = Callable[[Tensor], Tensor]
"""What stands between an expert's two products: [S, 2 I] -> [S, I]."""


def gated_halves(operators: Operators, activation: Callable[[Tensor], Tensor]) -> Gate:
    """The usual gate, `activation(gate) * up`, of rows that hold the gate before up."""
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
    in_few_kernels: bool = True,
) -> Tensor:
    """`sum_j weights[:, j] * down[e_j](gate(gate_up[e_j](x)))`, e = experts.

    x: [T, H]; experts: int64 [T, k]; weights: [T, k]; gate_up: [E, 2 I, H] and [E, 2 I];
    down: [E, H, I] and [E, H]. Returns [T, H] in the dtype of `x`. With P tensor-parallel ranks
    every rank holds I / P of the intermediate axis of all experts, and `down_bias` whole.
    `in_few_kernels`: whether `Operators.mix_few` may answer, where nobody asks for gradients.
    """
    has_biases = gate_up_bias is not None or down_bias is not None
    is_plain = not (torch.is_grad_enabled() or has_biases) and row_parallel.blocks == 1
    if in_few_kernels and is_plain:
        mixed = operators.mix_few(x, experts, weights, gate_up, down, gate)
        if mixed is not None:
            return mixed
    tokens, k = experts.shape
    rows, chosen = x[:, None].expand(-1, k, -1).reshape(tokens * k, -1), experts.reshape(-1)
    outputs = expert_outputs(
        operators, rows, chosen, gate_up, down, gate, row_parallel, gate_up_bias
    )
    mixed = mix_outputs(outputs, weights, row_parallel)
    if down_bias is not None:  # once, and not on every rank
        mixed = mixed + mix_outputs([_biases(chosen, down_bias)], weights, WHOLE)
    return mixed.to(x.dtype)


def expert_outputs(
    operators: Operators,
    rows: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: Gate,
    row_parallel: RowParallel,
    gate_up_bias: Tensor | None = None,
) -> list[Tensor]:
    """What its expert makes of each row, in this rank's blocks of the sum over I.

    rows: [S, H]; experts: int64 [S]; the rest as in `mix_experts`. Returns float32 [S, H] each.
    """
    chosen, order = experts.sort(stable=True)
    offsets = torch.searchsorted(chosen, torch.arange(len(gate_up) + 1, device=rows.device))
    if gate_up_bias is None:
        hidden = gate(operators.grouped_linear(rows[order], gate_up, offsets))
    else:
        sums = operators.grouped_partial_linear(rows[order], gate_up, offsets)
        hidden = gate((sums + _biases(chosen, gate_up_bias)).to(rows.dtype))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=rows.device)
    pairs = zip(row_parallel.split(hidden), row_parallel.split(down), strict=True)
    return [operators.grouped_partial_linear(*pair, offsets)[back] for pair in pairs]


def _biases(experts: Tensor, bias: Tensor) -> Tensor:
    """The bias of each row's expert: int64 [S], [E, N] -> float32 [S, N], the dtype gradients are
    summed in."""
    return F.embedding(experts, bias.float())


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
