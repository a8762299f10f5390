"""A mixture-of-experts layer whose every token is computed as if it were alone.

Rows are sorted by expert, so that each expert is one GEMM of a row-invariant `grouped_linear`, and
put back. A token's experts are added in the router's order, in float32, rounded once: neither the
other tokens of the batch nor the order in which experts run can change a bit. No step waits for the
device, so CUDA graphs can hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onpolicy.ops.base import Operators
from onpolicy.ops.row_parallel import RowParallel


def mix_experts(
    operators: Operators,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
    row_parallel: RowParallel,
) -> Tensor:
    """`sum_j weights[:, j] * down[e_j](activation(gate[e_j](x)) * up[e_j](x))`, e = experts.

    x: [T, H]; experts: int64 [T, k]; weights: [T, k]; gate_up: [E, 2 I, H], gate before up;
    down: [E, H, I]. Returns [T, H] in the dtype of `x`. With P tensor-parallel ranks every rank
    holds I / P of the intermediate axis of all experts.
    """
    tokens, k = experts.shape
    rows = x[:, None].expand(-1, k, -1).reshape(tokens * k, -1)
    outputs = expert_outputs(
        operators, rows, experts.reshape(-1), gate_up, down, activation, row_parallel
    )
    return mix_outputs(outputs, weights, row_parallel).to(x.dtype)


def expert_outputs(
    operators: Operators,
    rows: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor],
    row_parallel: RowParallel,
) -> list[Tensor]:
    """What its expert makes of each row, in this rank's blocks of the sum over I.

    rows: [S, H]; experts: int64 [S]; the rest as in `mix_experts`. Returns float32 [S, H] each.
    """
    chosen, order = experts.sort(stable=True)
    offsets = torch.searchsorted(chosen, torch.arange(len(gate_up) + 1, device=rows.device))
    gate, up = operators.grouped_linear(rows[order], gate_up, offsets).chunk(2, dim=-1)
    hidden = operators.gated(activation, gate, up)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=rows.device)
    pairs = zip(row_parallel.split(hidden), row_parallel.split(down), strict=True)
    return [operators.grouped_partial_linear(*pair, offsets)[back] for pair in pairs]


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
