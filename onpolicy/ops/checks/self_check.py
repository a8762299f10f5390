"""The self-check at start-up that the operators are row-invariant here, at this model's sizes.

Row invariance rests on observed behaviour of libraries that they do not promise. So every process
that must keep a contract runs its operators at the shapes of its model, on its own device, in all
the batch sizes that matter, and refuses to start if a single bit differs. Attention runs packed,
after a cached prefix, in decode, and on pages. A tensor-parallel rank computes some columns, heads
or blocks of K in a call of its own: each part must have the bits that it has in the whole, for
every degree up to the contract's `row_parallel_blocks`.

An engine reports digests of the results. They tell apart two processes whose operators are each
invariant but different (another CPU, another library) before they exchange a token.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.contract import AttentionShape, NumericsContract, OperatorShapes
from onpolicy.ops.backends.base import FP8_BLOCK
from onpolicy.ops.base import Operators
from onpolicy.ops.checks.delta_check import check_delta
from onpolicy.ops.checks.fixed_numbers import (
    ROWS,
    Results,
    check_alone,
    check_rows,
    columns_to_check,
    probe,
    require_equal,
)
from onpolicy.ops.checks.rowwise_check import check_rowwise
from onpolicy.ops.layouts import AttentionLayout, PagedLayout, ScoreRule
from onpolicy.ops.mixture_of_experts import gated_halves, mix_experts
from onpolicy.ops.row_parallel import WHOLE, RowParallel, tree_sum

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
        if contract.device == "cpu" and contract.dtype != "float32":
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
        lens = operators.key_chunk + 18, *LENS[1:]
        inputs = AttentionInputs.of(attention, dtype, device, lens)
        packed = check_attention(operators, inputs)
        yield inputs.name(), inputs.shape, packed
        paged = check_paged_attention(operators, inputs, packed)
        yield inputs.name("paged_attention"), inputs.shape, paged
    for delta in shapes.delta:
        yield from check_delta(operators, delta, dtype, device)
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
        delta=(),
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
    results = check_rows(name, (n, k), linear, x, counts)
    if device != "cpu":
        check_alone(name, (n, k), linear, x, results)
    return results[:ROWS]


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


QUERY_COUNTS = (1, 2, 5, *range(8, 129, 8))

LENS = (530, 1, 64, 65, 17)
"""Lengths of the packed sequences in the checks; one has several chunks of keys, here of 512."""

WINDOW = 100
"""Largest window in the checks, shorter than the longest sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """Whole sequences laid end to end, and the score rule of a layer of this kind."""

    kind: AttentionShape
    lens: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    scores: ScoreRule

    @staticmethod
    def of(
        kind: AttentionShape,
        dtype: torch.dtype,
        device: str = "cpu",
        lens: tuple[int, ...] = LENS,
        seed: int = 8,
    ) -> AttentionInputs:
        """Create inputs of `lens` tokens."""
        sizes = (
            (kind.heads, kind.head_dim),
            (kind.kv_heads, kind.head_dim),
            (kind.kv_heads, kind.value_dim),
        )
        q, k, v = (
            probe(sum(lens), *size, seed=seed + i, device=device).to(dtype)
            for i, size in enumerate(sizes)
        )
        sinks = probe(kind.heads, seed=seed + 3, device=device).to(dtype) if kind.sinks else None
        window = kind.window and min(kind.window, WINDOW)
        scores = ScoreRule(kind.head_dim**-0.5, window, kind.softcap, sinks)
        return AttentionInputs(kind=kind, lens=lens, q=q, k=k, v=v, scores=scores)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (H, H_kv, D), and D_v if it differs from D."""
        kind = self.kind
        sizes = (kind.heads, kind.kv_heads, kind.head_dim)
        return sizes if kind.value_dim == kind.head_dim else (*sizes, kind.value_dim)

    def name(self, operator: str = "attention") -> str:
        """Return the operator's name with the options of its scores."""
        kind = self.kind
        special = [f"window {kind.window}"] if kind.window else []
        special += [f"softcap {kind.softcap}"] if kind.softcap else []
        special += ["sinks"] if kind.sinks else []
        return f"{operator} with {', '.join(special)}" if special else operator

    def attend(
        self, operators: Operators, layout: AttentionLayout, rows: slice | Tensor | None = None
    ) -> Tensor:
        """Compute the operator for all queries, or for the given rows."""
        q = self.q if rows is None else self.q[rows]
        return operators.attention(q, self.k, self.v, layout, self.scores)

    def of_rank(self, rank: int, ranks: int) -> AttentionInputs:
        """Return the heads of one tensor-parallel rank."""
        q, k, v = (x.chunk(ranks, dim=1)[rank] for x in (self.q, self.k, self.v))
        sinks = self.scores.sinks
        own = None if sinks is None else sinks.chunk(ranks)[rank]
        return replace(self, q=q, k=k, v=v, scores=replace(self.scores, sinks=own))


def check_attention(operators: Operators, inputs: AttentionInputs) -> Tensor:
    """Attend over the packed sequences, and check that rows keep their bits in smaller calls."""
    name, shape, device, lens = inputs.name(), inputs.shape, inputs.q.device, inputs.lens
    whole = AttentionLayout.packed(lens, device)
    packed = inputs.attend(operators, whole)
    # The last `count` tokens of the longest sequence as queries, the others as a cached prefix.
    for count in QUERY_COUNTS:
        layout = AttentionLayout(
            query_lens=(count,), key_lens=lens[:1], key_rows=whole.key_rows[:1]
        )
        rows = slice(lens[0] - count, lens[0])
        alone = inputs.attend(operators, layout, rows)
        require_equal(name, shape, f"{count} queries alone", alone, packed[rows])
    # One decode step of all the sequences at once.
    ends = torch.tensor(lens, device=device).cumsum(0)
    layout = AttentionLayout(query_lens=(1,) * len(lens), key_lens=lens, key_rows=whole.key_rows)
    decode = inputs.attend(operators, layout, ends - 1)
    require_equal(name, shape, "a decode step", decode, packed[ends - 1])
    return packed


def check_paged_attention(operators: Operators, inputs: AttentionInputs, packed: Tensor) -> Tensor:
    """Prefill from pages of one key; check this and smaller calls against `packed`."""
    q, k, v, device = inputs.q, inputs.k, inputs.v, inputs.q.device
    name, shape, lens = inputs.name("paged_attention"), inputs.shape, inputs.lens
    # Reversed, so that no key lies where it does in training.
    pages = len(k) - 1 - AttentionLayout.packed(lens, device).key_rows
    stores = k.flip(0)[:, None], v.flip(0)[:, None]
    key_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    ends = key_lens.cumsum(0)

    def attend(counts: tuple[int, ...], case: str) -> Tensor:
        """Attend with the last queries of every sequence."""
        starts = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
        layout = PagedLayout(
            page_table=pages.to(torch.int32),
            page_size=1,
            key_lens=key_lens,
            query_starts=starts.to(device),
            max_query_len=max(counts),
        )
        spans = [torch.arange(end - n, end) for end, n in zip(ends.tolist(), counts, strict=True)]
        rows = torch.cat(spans).to(device)
        out = operators.paged_attention(q[rows], *stores, layout, inputs.scores)
        require_equal(name, shape, case, out, packed[rows])
        return out

    attend((1,) * len(lens), "a decode step")
    attend(tuple(min(n, 40) for n in lens), "the last queries of each sequence")
    return attend(lens, "a prefill")


SHARD_ROW_COUNTS = (1, 17, 64, 256)


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
    return probe(SHARD_ROW_COUNTS[-1], size, seed=7, device=str(like.device)).to(like.dtype)


def _check_columns(operators: Operators, weight: Tensor, bias: Tensor | None, parts: int) -> None:
    x, shape = _rows(weight.shape[1], weight), tuple(weight.shape)
    for count in SHARD_ROW_COUNTS:
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
    for count in SHARD_ROW_COUNTS:
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
