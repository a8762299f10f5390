"""Linears against cuBLAS, and against SGLang's own batch-invariant kernel where it is installed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_ops.cases import DEVICE, Aligned, Calls, Case, Goal, calls_of, normal, rotating
from onpolicy.ops.row_parallel import RowParallel
from tests.support.gpu.shapes import ModelShape

ROW_COUNTS = (1, 8, 32, 128, 1024, 8192)
MAX_HEAD_ROWS = 1024
"""Rows of the output projection: both engines compute logits of few rows at a time."""
BLOCKS = (2, 8)
"""Numbers of blocks of K, for up to as many tensor-parallel ranks."""


def linear_cases(model: ModelShape) -> Iterator[Case]:
    for name, (n, k) in model.linears().items():
        for m in ROW_COUNTS:
            if name != "lm_head" or m <= MAX_HEAD_ROWS:
                yield _case(f"{model.name} {name} {n}x{k}", m, n, k)


def row_parallel_cases(model: ModelShape) -> Iterator[Case]:
    """Yield the cases of a sum over K that does not depend on the tensor-parallel degree."""
    n, k = model.linears()["o"]
    for m, blocks in itertools.product(ROW_COUNTS, BLOCKS):
        yield _case(f"{model.name} o {n}x{k}, {blocks} blocks", m, n, k, blocks)


def _case(where: str, m: int, n: int, k: int, blocks: int = 1) -> Case:
    operator = "linear" if blocks == 1 else "row_parallel_linear"

    def make(aligned: Aligned, l2_bytes: int) -> Calls:
        sets = rotating(
            lambda i: (normal(m, k, seed=i), normal(n, k, seed=i, scale=k**-0.5)), l2_bytes
        )
        functions: dict[str, Callable[..., object]] = {"torch.mm": lambda x, w: torch.mm(x, w.t())}
        if operator == "linear" and (product := sglang_matmul()) is not None:
            functions["sglang"] = lambda x, w: product(x, w.t())
        for backend, ops in aligned.items():
            how = RowParallel(blocks)
            functions[backend] = partial(ops.row_parallel_linear, bias=None, row_parallel=how)
        return calls_of(functions, sets), len(sets)

    fraction = 0.95 if m >= 1024 else 0.9
    return Case(
        operator=operator,
        where=where,
        rows=m,
        flops=2.0 * m * n * k,
        bytes=2.0 * (m * k + n * k + m * n),
        goal=Goal(fraction, "torch.mm") if operator == "linear" else None,
        make=make,
    )


def sglang_matmul() -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return SGLang's own batch-invariant product, [M, K] x [K, N] -> [M, N]; None if not
    installed, or without a GPU."""
    if DEVICE == "cpu":
        return None
    try:
        from sglang.srt.batch_invariant_ops.batch_invariant_ops import matmul_persistent
    except ImportError:
        return None
    return matmul_persistent


def expert_cases(model: ModelShape) -> Iterator[Case]:
    """Yield grouped linears with uniformly random experts, against torch's grouped GEMM."""
    for name, (experts, n, k) in model.expert_linears().items():
        for tokens in (8, 128, 8192):
            yield _expert_case(model, name, tokens, experts, n, k)


def _expert_case(model: ModelShape, name: str, tokens: int, experts: int, n: int, k: int) -> Case:
    rows = tokens * model.experts_per_token

    def make(aligned: Aligned, l2_bytes: int) -> Calls:
        generator = torch.Generator().manual_seed(tokens)
        chosen = torch.randint(experts, (rows,), generator=generator).sort().values
        offsets = torch.searchsorted(chosen, torch.arange(experts + 1)).to(DEVICE)
        ends = offsets[1:].to(torch.int32)
        sets = rotating(
            lambda i: (normal(rows, k, seed=i), normal(experts, n, k, seed=i)), l2_bytes
        )

        def stock(x: Tensor, weight: Tensor) -> Tensor:
            return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

        functions: dict[str, Callable[..., object]] = {"torch.grouped_mm": stock}
        for backend, ops in aligned.items():
            functions[backend] = partial(ops.grouped_linear, offsets=offsets)
        return calls_of(functions, sets), len(sets)

    touched = min(experts, rows)
    return Case(
        operator="grouped_linear",
        where=f"{model.name} {name} {experts}x{n}x{k}",
        rows=rows,
        flops=2.0 * rows * n * k,
        bytes=2.0 * (rows * k + touched * n * k + rows * n),
        goal=Goal(0.95 if tokens >= 1024 else 0.9, "torch.grouped_mm"),
        make=make,
    )
