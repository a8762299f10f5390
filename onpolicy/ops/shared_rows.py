"""Rows that are read several times, with gradients summed in a fixed order.

A sum by index (index_add) adds in the order in which threads arrive, always so on a GPU. Here rows
are added in the order in which they were read, and the sum is rounded once. They are added a run at
a time. Where runs are short and more numerous than the readings of any row, they are added a
reading at a time: the first reading of all rows, then the second, and so on.
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
"""Number of rows of a run from which it is added in place; shorter ones are gathered first, which
takes as long as three additions, since each call takes as long as some rows."""


@dataclass(frozen=True)
class SharedRows:
    """The rows of a tensor that are read, in order, where some are read more than once."""

    rows: Tensor
    """int64 [N]"""

    runs: list[tuple[slice, slice]]
    """Consecutive rows, as pairs: (slice of the N readings, slice of the tensor)."""

    @staticmethod
    def of(rows: Sequence[int]) -> SharedRows:
        """Create from the [N] rows, on the CPU: runs are found before anything moves to a device."""
        breaks = (i for i, (a, b) in enumerate(pairwise(rows), start=1) if b != a + 1)
        cuts = pairwise([0, *breaks, len(rows)] if rows else [0])
        runs = [(slice(i, j), slice(rows[i], rows[i] + j - i)) for i, j in cuts]
        return SharedRows(torch.tensor(rows, dtype=torch.int64), runs)

    def then(self, first: int, count: int) -> SharedRows:
        """Return these rows followed by `count` more, consecutive from `first` on."""
        more = torch.arange(first, first + count, device=self.rows.device)
        read = slice(len(self.rows), len(self.rows) + count)
        rows = torch.cat([self.rows, more])
        return SharedRows(rows, [*self.runs, (read, slice(first, first + count))])

    def on(self, device: torch.device | str) -> SharedRows:
        """Return the same on a device."""
        return replace(self, rows=self.rows.to(device))

    def take(self, x: Tensor) -> Tensor:
        """Read the rows, [M, ...] -> [N, ...], with the gradient that `add_up` computes."""
        taken: Tensor = _Take.apply(x, self)
        return taken

    def add_up(self, grad: Tensor, count: int) -> Tensor:
        """Return the gradient of all rows from the readings': [N, ...] -> [count, ...] in its dtype.

        Sums are float32, in the order of reading.
        """
        total = grad.new_zeros(count, *grad.shape[1:], dtype=torch.float32)
        # Both ways add the readings of a row in their order, so they give the same bits.
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
        """Return whether adding a reading at a time is faster; False on a device, to avoid a sync."""
        if self.rows.device.type != "cpu":
            return False
        return len(self.rows) < SHORT_RUN * len(self.runs) and 3 * self._most < len(self.runs)

    @cached_property
    def _most(self) -> int:
        """Return the largest number of readings of a row."""
        return int(self.rows.bincount().max()) if len(self.rows) else 0

    @cached_property
    def _readings(self) -> list[tuple[Tensor, Tensor]]:
        """Return, for each n, the n-th readings and their rows: (of N, of the tensor)."""
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
