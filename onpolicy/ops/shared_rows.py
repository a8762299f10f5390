"""Rows that are read several times, and gradients of theirs that are summed in one order.

A sum by index adds in the order in which threads arrive, on a GPU always. Here rows are added a run at
a time, in the order in which they were read, and the sum is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.layouts import AttentionLayout

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Which rows of a tensor are read, in their order, and some of them more than once."""

    rows: Tensor
    """int64 [N]"""

    runs: list[tuple[slice, slice]]
    """Rows that follow each other, where they are read and where they lie: (of N, of the tensor)."""

    @staticmethod
    def of(rows: Tensor) -> SharedRows:
        """The rows of int64 [N]; waits for the device."""
        known = rows.tolist()
        breaks = (i for i, (a, b) in enumerate(pairwise(known), start=1) if b != a + 1)
        cuts = pairwise([0, *breaks, len(known)] if known else [0])
        return SharedRows(rows, [(slice(i, j), slice(known[i], known[i] + j - i)) for i, j in cuts])

    def take(self, x: Tensor) -> Tensor:
        """[M, ...] -> [N, ...] with its gradient as `add_up` has it."""
        taken: Tensor = _Take.apply(x, self)
        return taken

    def add_up(self, grad: Tensor, count: int) -> Tensor:
        """The gradient of all rows from that of those read, [N, ...] -> [count, ...] in its dtype.

        Sums are float32, in the order of reading.
        """
        total = grad.new_zeros(count, *grad.shape[1:], dtype=torch.float32)
        for read, lie in self.runs:
            total[lie] += grad[read]
        return total.to(grad.dtype)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, shared: SharedRows) -> Tensor:
        ctx.shared, ctx.count = shared, len(x)  # type: ignore[attr-defined]
        return x.index_select(0, shared.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shared.add_up(grad, ctx.count), None  # type: ignore[attr-defined]


def attention_gradients(
    of_packed: Callable[[Tensor, Tensor, AttentionLayout], Gradients],
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
) -> Gradients:
    """The gradients of q, k and v, by a function that needs every key row to be used at most once.

    of_packed: (k, v, layout) -> the gradients of q and of these. Where sequences share keys, it gets
    copies of them, sequence after sequence, and what these are given back is added up in that order.
    """
    if not layout.shares_keys:
        return of_packed(k, v, layout)
    apart, shared = _apart(layout)
    of_q, of_k, of_v = of_packed(k[shared.rows], v[shared.rows], apart)
    return of_q, shared.add_up(of_k, len(k)), shared.add_up(of_v, len(v))


def _apart(layout: AttentionLayout) -> tuple[AttentionLayout, SharedRows]:
    """The layout over copies of its keys, and which keys those are; for all layers of a model."""
    if SharedRows not in layout.plans:
        rows, lens = layout.key_rows, layout.key_lens
        shared = SharedRows.of(torch.cat([x[:n] for x, n in zip(rows, lens, strict=True)]))
        apart = AttentionLayout(
            query_lens=layout.query_lens,
            key_lens=lens,
            key_rows=AttentionLayout.packed(lens, rows.device).key_rows,
        )
        layout.plans[SharedRows] = apart, shared
    found: tuple[AttentionLayout, SharedRows] = layout.plans[SharedRows]
    return found
