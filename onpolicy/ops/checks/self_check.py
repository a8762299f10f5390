"""The self-check at start-up that the operators are row-invariant here, at this model's sizes.

Row invariance rests on observed behaviour of libraries that they do not promise. So every process
that must keep a contract runs its operators at the shapes of its model, on its own device, in all
the batch sizes that matter, and refuses to start if a single bit differs. An engine reports digests
of the results. They tell apart two processes whose operators are each invariant but different
(another CPU, another library) before they exchange a token.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.contract import NumericsContract, OperatorShapes
from onpolicy.ops.backends.base import FP8_BLOCK
from onpolicy.ops.base import Operators
from onpolicy.ops.checks.attention_check import (
    AttentionInputs,
    check_attention,
    check_paged_attention,
)
from onpolicy.ops.checks.probe import (
    ROWS,
    Results,
    check_rows,
    columns_to_check,
    probe,
    require_equal,
)
from onpolicy.ops.checks.rowwise_check import check_rowwise
from onpolicy.ops.checks.shard_check import check_shards
from onpolicy.ops.experts import gated_halves, mix_experts
from onpolicy.ops.row_parallel import WHOLE, RowParallel

ROW_COUNTS = (1, 2, 7, 12, *range(16, 257, 16), 299)
CPU_ROW_COUNTS = (*ROW_COUNTS, 511, 1024)
"""Row counts for the CPU operators, which have no GEMM of more rows."""
GPU_ROW_COUNTS = (*CPU_ROW_COUNTS, 2049, 4096)
"""Row counts for a GPU, whose GEMMs may differ for larger numbers of rows too."""

EXPERTS_ROW_COUNTS = (1, 2, 7, 64, 299)
"""Token counts for experts; the router spreads tokens over experts, so these make GEMMs of many
sizes."""

MAX_EXPERTS = 3
"""Number of experts of a layer in the check: enough to find out whether rows are mixed up."""

MAX_NUMBERS = 1 << 28
"""Bound on the inputs, and on the outputs, of one GEMM on a GPU, unless ROWS rows exceed it."""


def self_check(
    operators: Operators, contract: NumericsContract, longest: int = 0
) -> dict[str, str]:
    """Run every operator at the contract's shapes; return a digest of each one's results.

    longest: most tokens that this process passes to a GEMM at a time, in a prefill chunk or a
    micro-batch. A GPU is checked up to there, which also compiles the kernels of all sizes before a
    request waits for them.
    Raise ContractError that names the operator, its shape and the batch at which a row changed.
    """
    with torch.no_grad():
        digests = _digests(check_rowwise(operators, contract))
        if contract.device == "cpu" and contract.dtype == "bfloat16":
            # The CPU operators sum in float32 here too, and rounding would hide most of a sum.
            _digests(_products(operators, replace(contract, dtype="float32")))
        return digests | _digests(_products(operators, contract, longest))


def _digests(results: Results) -> dict[str, str]:
    return {
        f"{name} {'x'.join(map(str, shape))}": _digest(result) for name, shape, result in results
    }


def _digest(result: Tensor) -> str:
    values = result.contiguous().cpu().view(torch.uint8).numpy()
    return hashlib.sha256(values.tobytes()).hexdigest()[:8]


def _products(operators: Operators, contract: NumericsContract, longest: int = 0) -> Results:
    dtype, shapes, device = getattr(torch, contract.dtype), contract.shapes, contract.device
    row_parallel = RowParallel(contract.row_parallel_blocks)
    for kind, how, linears in (
        ("linear", WHOLE, shapes.linear),
        ("row-parallel linear", row_parallel, shapes.row_linear),
    ):
        for n, k, has_bias in linears:
            name = f"{kind} with bias" if has_bias else kind
            check = _check_linear(operators, n, k, has_bias, how, dtype, device, longest)
            yield name, (n, k), check
    if row_parallel.blocks > 1:
        check_shards(operators, contract)
    for attention in shapes.attention:
        inputs = AttentionInputs.of(attention, dtype, device)
        packed = check_attention(operators, inputs)
        yield inputs.name(), inputs.shape, packed
        paged = check_paged_attention(operators, inputs, packed)
        yield inputs.name("paged_attention"), inputs.shape, paged
    for sizes in shapes.experts:
        yield "experts", sizes, _check_experts(operators, contract, sizes)
    if (of_rounded := operators.of_rounded) is not operators:
        narrow = replace(contract, shapes=shapes_in_blocks(shapes, row_parallel.blocks))
        for name, shape, result in _products(of_rounded, narrow, longest):
            yield f"{name} of bytes", shape, result


def shapes_in_blocks(shapes: OperatorShapes, blocks: int) -> OperatorShapes:
    """Return only the linears whose part on every rank consists of whole FP8 blocks."""
    most = FP8_BLOCK * blocks
    return replace(
        shapes,
        linear=tuple((n, k, b) for n, k, b in shapes.linear if n % most == k % FP8_BLOCK == 0),
        row_linear=tuple(
            (n, k, b) for n, k, b in shapes.row_linear if n % FP8_BLOCK == k % most == 0
        ),
        attention=(),
        experts=(),
    )


def _check_linear(
    operators: Operators,
    n: int,
    k: int,
    has_bias: bool,
    row_parallel: RowParallel,
    dtype: torch.dtype,
    device: str,
    longest: int,
) -> Tensor:
    columns = columns_to_check(n, operators.column_tile)
    weight = probe(columns, k, seed=5, device=device).div_(k**0.5).to(dtype)
    bias = probe(columns, seed=6, device=device).to(dtype) if has_bias else None
    counts = CPU_ROW_COUNTS
    if device != "cpu":
        counts = gpu_row_counts(longest, MAX_NUMBERS // max(columns, k))
    x = probe(counts[-1] + 3, k, seed=7, device=device).to(dtype)

    def linear(x: Tensor) -> Tensor:
        return operators.row_parallel_linear(x, weight, bias, row_parallel)

    name = "linear" if row_parallel is WHOLE else "row-parallel linear"
    return check_rows(name, (n, k), linear, x, counts)[:ROWS]


def gpu_row_counts(longest: int, most: int) -> tuple[int, ...]:
    """Return GPU_ROW_COUNTS and further counts up to `longest`, none above `most` rows.

    Further counts are powers of two and the midpoints between them, where GEMMs change their tiles.
    """
    powers = [GPU_ROW_COUNTS[-1] << i for i in range(longest.bit_length())]
    further = [n for power in powers for n in (power, power + power // 2) if n < longest]
    every = sorted({*GPU_ROW_COUNTS, *further, longest} - {0})
    return tuple(count for count in every if count <= max(most, ROW_COUNTS[-1]))


def _check_experts(
    operators: Operators, contract: NumericsContract, sizes: tuple[int, int, int, int]
) -> Tensor:
    """Check a router with all its experts, and the products of the first few."""
    num_experts, intermediate, hidden, k = sizes
    dtype, device = getattr(torch, contract.dtype), contract.device
    few = min(num_experts, MAX_EXPERTS)
    router = probe(num_experts, hidden, seed=11, device=device).div_(hidden**0.5).to(dtype)
    gate_up = probe(few, 2 * intermediate, hidden, seed=12, device=device).div_(hidden**0.5)
    down = probe(few, hidden, intermediate, seed=13, device=device).div_(intermediate**0.5)
    weights = gate_up.to(dtype), down.to(dtype)
    gate, row_parallel = gated_halves(operators, F.silu), RowParallel(contract.row_parallel_blocks)

    def layer(x: Tensor, in_few_kernels: bool = True) -> Tensor:
        scores, chosen = operators.topk(operators.softmax(operators.linear(x, router)), k)
        given = x, chosen % few, scores, *weights, gate, row_parallel
        return mix_experts(operators, *given, in_few_kernels=in_few_kernels)

    x = probe(ROWS, hidden, seed=14, device=device).to(dtype)
    mixed = check_rows("experts", sizes, layer, x, EXPERTS_ROW_COUNTS)
    require_equal("experts", sizes, "kernels of more rows", layer(x, in_few_kernels=False), mixed)
    return mixed
