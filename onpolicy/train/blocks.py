"""What maps each element of large tensors by itself, a block at a time, on the threads of the operators.

Of a block that stays in a core's cache several passes cost little more than one. A block is a multiple
of what a kernel does in one go, so each element meets the code, vectorised or scalar, that it would
meet in the whole tensor: the bits are the same, and so they are on any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from onpolicy.ops import Operators
from onpolicy.ops.base import Piece

BLOCKS = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Elements of a block: on a CPU a few of 256 KiB in float32 fit a core's cache."""

WORK = 10.0
"""Floating-point operations for an element, roughly."""


def run_in_blocks(
    operators: Operators, work: Sequence[tuple[Callable[..., None], Sequence[Tensor]]]
) -> None:
    """Call each function with every block of its tensors: contiguous, of one size, this rank's part.

    Blocks are independent and come in no particular order.
    """
    pieces = [
        piece for function, tensors in work for piece in _pieces(function, [*map(_flat, tensors)])
    ]
    operators.run_pieces(pieces, WORK * sum(_flat(tensors[0]).numel() for _, tensors in work))


def _pieces(function: Callable[..., None], tensors: Sequence[Tensor]) -> list[Piece]:
    size = BLOCKS[tensors[0].device.type]

    def piece(start: int) -> None:
        function(*(x[start : start + size] for x in tensors))

    return [lambda start=start: piece(start) for start in range(0, tensors[0].numel(), size)]  # type: ignore[misc]


def _flat(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach().view(-1)
