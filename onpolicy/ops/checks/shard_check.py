"""The self-check of what tensor parallelism shards: columns, heads, and blocks of K.

A rank computes a part of an operator's output, or of its sum, in a call of its own. Each part must
have the bits that it has in the whole, for every degree up to the contract's `row_parallel_blocks`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onpolicy.contract import AttentionShape, NumericsContract
from onpolicy.ops.base import Operators
from onpolicy.ops.checks.attention_check import AttentionInputs
from onpolicy.ops.checks.probe import columns_to_check, probe, require_equal
from onpolicy.ops.layouts import AttentionLayout
from onpolicy.ops.row_parallel import RowParallel, tree_sum

ROW_COUNTS = (1, 17, 64, 256)


def check_shards(operators: Operators, contract: NumericsContract) -> None:
    """Raise ContractError that names the operator, its shape and the part that changed."""
    dtype, shapes, device = getattr(torch, contract.dtype), contract.shapes, contract.device
    blocks = contract.row_parallel_blocks
    for n, k, has_bias in shapes.linear:
        columns = columns_to_check(n, operators.column_tile)
        bias = probe(columns, seed=6, device=device).to(dtype) if has_bias else None
        weight = probe(columns, k, seed=5, device=device).div_(k**0.5).to(dtype)
        _check_columns(operators, weight, bias, blocks)
    for n, k, _ in shapes.row_linear:
        _check_blocks(operators, probe(n, k, seed=5, device=device).div_(k**0.5).to(dtype), blocks)
    for kind in shapes.attention:
        _check_heads(operators, kind, blocks, dtype, device)


def _rows(size: int, like: Tensor) -> Tensor:
    return probe(ROW_COUNTS[-1], size, seed=7, device=str(like.device)).to(like.dtype)


def _check_columns(operators: Operators, weight: Tensor, bias: Tensor | None, parts: int) -> None:
    x, shape = _rows(weight.shape[1], weight), tuple(weight.shape)
    for count in ROW_COUNTS:
        whole = operators.linear(x[:count], weight, bias)
        for columns in torch.arange(len(weight), device=weight.device).chunk(parts):
            mine, my_bias = weight[columns], None if bias is None else bias[columns]
            part = operators.linear(x[:count], mine, my_bias)
            case = f"{count} rows, {len(columns)} of the columns"
            require_equal("linear", shape, case, part, whole[:, columns])


def _check_blocks(operators: Operators, weight: Tensor, blocks: int) -> None:
    """Check each block in memory of its own, as on a rank that holds only this block."""
    x, shape = _rows(weight.shape[1], weight), tuple(weight.shape)
    row_parallel = RowParallel(blocks)
    alone = [block.contiguous() for block in row_parallel.split(weight)]
    for count in ROW_COUNTS:
        whole = operators.row_parallel_linear(x[:count], weight, None, row_parallel)
        pairs = zip(row_parallel.split(x[:count]), alone, strict=True)
        parts = tree_sum([operators.partial_linear(*pair) for pair in pairs]).to(x.dtype)
        case = f"{count} rows, {blocks} ranks"
        require_equal("row-parallel linear", shape, case, parts, whole)


def _check_heads(
    operators: Operators, kind: AttentionShape, blocks: int, dtype: torch.dtype, device: str
) -> None:
    """Check the heads of each rank, for as many ranks as can share the key heads."""
    lens, ranks = (100, 1, 65), math.gcd(kind.kv_heads, blocks)
    inputs = AttentionInputs.of(kind, dtype, device, lens)
    layout = AttentionLayout.packed(lens, device)
    whole = inputs.attend(operators, layout)
    for rank in range(ranks):
        got = inputs.of_rank(rank, ranks).attend(operators, layout)
        case = f"{kind.heads // ranks} of the heads"
        require_equal(inputs.name(), inputs.shape, case, got, whole.chunk(ranks, 1)[rank])
