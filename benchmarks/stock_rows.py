"""PyTorch's own CPU operators that give a row other bits alone than among others on this machine.

    python -m benchmarks.stock_rows
    ATEN_CPU_CAPABILITY=default MKL_CBWR= python -m benchmarks.stock_rows

Prints one line: what the libraries use, and for every operator how many
numbers of 100 differ. benchmarks/README.md keeps such lines, because no test may rely on them.
(An empty MKL_CBWR leaves MKL as it comes, `OFF` is its mode AUTO; onpolicy asks for its strict mode.)
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.compat.process import prepare_process
from onpolicy.ops import AttentionLayout, ScoreRule
from onpolicy.ops.stock import StockOperators

STOCK = StockOperators(1)
ROWS, LAST = 64, 8


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([function(row) for row in x.split(1)])


def share(function: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the numbers of function(x), per 100 of them, that differ when every row is alone."""
    whole = function(x)
    return 100 * (row_by_row(function, x) != whole).float().mean().item()


def attention_share() -> float:
    """Compare the last queries of a sequence, one by one as decode steps, with all of them at once."""
    q, k, v = normal(200, 4, 64), normal(200, 2, 64, seed=1), normal(200, 2, 64, seed=2)
    whole = STOCK.attention(q, k, v, AttentionLayout.packed((200,)), ScoreRule(0.125))[-LAST:]
    steps = [
        AttentionLayout(query_lens=(1,), key_lens=(n,), key_rows=torch.arange(n)[None])
        for n in range(201 - LAST, 201)
    ]
    rows = [STOCK.attention(q[s.key_lens[0] - 1 :][:1], k, v, s, ScoreRule(0.125)) for s in steps]
    return 100 * (torch.cat(rows) != whole).float().mean().item()


def column_share(rows: int = 64) -> float:
    """Compare a linear of 416 columns with its four quarters, as tensor-parallel ranks have them."""
    x, weight = normal(rows, 1000), normal(416, 1000, seed=1)
    parts = torch.cat([STOCK.linear(x, part) for part in weight.chunk(4)], dim=1)
    return 100 * (parts != STOCK.linear(x, weight)).float().mean().item()


def main() -> None:
    prepare_process()
    x, wide = normal(ROWS, 37), normal(ROWS, 1024)
    short, long = normal(768, 256, seed=1), normal(256, 1024, seed=1)
    results = {
        "linear K=256": share(lambda r: STOCK.linear(r, short), normal(ROWS, 256)),
        "linear K=1024": share(lambda r: STOCK.linear(r, long), wide),
        "linear bf16": share(lambda r: STOCK.linear(r, long.bfloat16()), wide.bfloat16()),
        "columns": column_share(),
        "attention": attention_share(),
        "silu": share(F.silu, x),
        "gelu": share(F.gelu, x),
        "rms_norm": share(lambda r: STOCK.rms_norm(r, torch.ones(1024), 1e-6), wide),
        "log_softmax": share(lambda r: torch.log_softmax(r, -1), wide),
    }
    capability = torch.backends.cpu.get_cpu_capability()
    chosen = [
        f"{k}={os.environ[k]}" for k in sorted(os.environ) if k.startswith(("MKL_", "ONEDNN"))
    ]
    numbers = ", ".join(f"{name} {value:.3g}" for name, value in results.items())
    print(f"ATen {capability} {' '.join(chosen)}: {numbers}")


if __name__ == "__main__":
    main()
