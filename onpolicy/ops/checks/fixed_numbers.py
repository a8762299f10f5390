"""The parts of the start-up checks: fixed numbers, and an error that says what differed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from onpolicy.compat.process import strict_sums_remedy
from onpolicy.errors import ContractError

ROWS = 300

ALONE = 64
"""Number of rows that a GPU multiplies one by one. bfloat16 hides most differences between two orders of
a float32 sum: of 262,144 results over K = 2,560 it leaves 6."""

Results = Iterator[tuple[str, tuple[int, ...], Tensor]]
"""Operator, the sizes it ran at, and its result."""


def probe(*shape: int, seed: int, device: str = "cpu") -> Tensor:
    """Return fixed numbers in (-1, 1), the same on every machine, thread count and torch version."""
    size = torch.Size(shape).numel()
    words = torch.arange(size, dtype=torch.int64, device=device).add_(seed * 7919)
    words.mul_(2654435761).remainder_(1 << 20).sub_(1 << 19)
    return words.float().div_(1 << 19).view(shape)


def columns_to_check(n: int, tile: int | None) -> int:
    """Return the columns of one full and the last partial tile; other columns run the same GEMMs."""
    return n if tile is None or n <= tile else tile + n % tile


def require_equal(name: str, shape: tuple[int, ...], case: str, got: Tensor, want: Tensor) -> None:
    """Raise ContractError if an operator gave different bits for a part than for the whole."""
    if not torch.equal(got, want):
        remedy = strict_sums_remedy() or (
            "Choose other --operators, or run without --true-on-policy-mode here, and report the "
            "processor and torch version."
        )
        raise ContractError(
            f"operator={name}, shape={shape}, case={case!r}: {int((got != want).sum())} of "
            f"{want.numel()} values differ from the same ones in a larger call, so this machine's "
            f"kernels are not row-invariant and rollout and training cannot agree bit for bit. {remedy}"
        )


def check_rows(
    name: str,
    shape: tuple[int, ...],
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    counts: tuple[int, ...],
) -> Tensor:
    """Return function(x) after checking that its rows keep their bits in cut and reversed batches."""
    reference = function(x)
    for rows in counts:
        require_equal(name, shape, f"{rows} rows", function(x[:rows]), reference[:rows])
    require_equal(name, shape, "rows in reverse", function(x.flip(0)), reference.flip(0))
    return reference


def check_alone(
    name: str, shape: tuple[int, ...], function: Callable[[Tensor], Tensor], x: Tensor, want: Tensor
) -> None:
    """Check that the first rows keep their bits when each has a call of its own."""
    alone = torch.cat([function(row) for row in x[:ALONE].split(1)])
    require_equal(name, shape, "each row alone", alone, want[:ALONE])
