"""Rows that are read several times, and gradients of theirs that are summed in one order.

A sum by index adds in the order in which threads arrive, on a GPU always. Here rows are added in the
order in which they were read, and the sum is rounded once: a run at a time, or, where runs are short and
more than the readings of any row, a reading at a time, the first of all rows, then the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

SHORT_RUN = 64
"""Rows. Longer runs are added where they lie; shorter ones are copied together first, which takes as
long as three additions, since each call takes as long as some rows."""


@dataclass(frozen=True)
class SharedRows:
    """Which rows of a tensor are read, in their order, and some of them more than once."""

    rows: Tensor
    """int64 [N]"""

    runs: list[tuple[slice, slice]]
    """Rows that follow each other, where they are read and where they lie: (of N, of the tensor)."""

    @staticmethod
    def of(rows: Sequence[int]) -> SharedRows:
        """The [N] rows, on the CPU: runs are found before anything is on a device."""
        breaks = (i for i, (a, b) in enumerate(pairwise(rows), start=1) if b != a + 1)
        cuts = pairwise([0, *breaks, len(rows)] if rows else [0])
        runs = [(slice(i, j), slice(rows[i], rows[i] + j - i)) for i, j in cuts]
        return SharedRows(torch.tensor(rows, dtype=torch.int64), runs)

    def then(self, first: int, count: int) -> SharedRows:
        """With so many rows more, which follow each other from `first` on."""
        more = torch.arange(first, first + count, device=self.rows.device)
        read = slice(len(self.rows), len(self.rows) + count)
        rows = torch.cat([self.rows, more])
        return SharedRows(rows, [*self.runs, (read, slice(first, first + count))])

    def on(self, device: torch.device | str) -> SharedRows:
        """The same on a device."""
        return replace(self, rows=self.rows.to(device))

    def take(self, x: Tensor) -> Tensor:
        """[M, ...] -> [N, ...] with its gradient as `add_up` has it."""
        taken: Tensor = _Take.apply(x, self)
        return taken

    def add_up(self, grad: Tensor, count: int) -> Tensor:
        """The gradient of all rows from that of those read, [N, ...] -> [count, ...] in its dtype.

        Sums are float32, in the order of reading.
        """
        total = grad.new_zeros(count, *grad.shape[1:], dtype=torch.float32)
        if self._has_short_runs:
            for source, place in self._readings:
                more = grad.index_select(0, source)
                total.index_copy_(0, place, total.index_select(0, place).add_(more))
        else:
            for read, lie in self.runs:
                total[lie] += grad[read]
        return total.to(grad.dtype)

    @cached_property
    def _has_short_runs(self) -> bool:
        """Return whether a reading at a time is faster; on a CPU alone, since a device would be
        waited for."""
        if self.rows.device.type != "cpu":
            return False
        return len(self.rows) < SHORT_RUN * len(self.runs) and 3 * self._most < len(self.runs)

    @cached_property
    def _most(self) -> int:
        """How often the row is read that is read most often."""
        return int(self.rows.bincount().max()) if len(self.rows) else 0

    @cached_property
    def _readings(self) -> list[tuple[Tensor, Tensor]]:
        """Which rows have an nth reading, where that is, and where they lie, for each n: (of N, of the
        tensor)."""
        order = self.rows.argsort(stable=True)
        lie = self.rows[order]
        counts = lie.unique_consecutive(return_counts=True)[1]
        firsts = counts.cumsum(0) - counts
        nth = torch.arange(len(lie), device=lie.device) - firsts.repeat_interleave(counts)
        return [(order[nth == n], lie[nth == n]) for n in range(self._most)]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, shared: SharedRows) -> Tensor:
        ctx.shared, ctx.count = shared, len(x)  # type: ignore[attr-defined]
        return x.index_select(0, shared.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shared.add_up(grad, ctx.count), None  # type: ignore[attr-defined]
