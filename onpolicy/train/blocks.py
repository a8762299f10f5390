"""Elementwise functions on large tensors, a block at a time, on the threads of the operators.

Several passes over a block in a core's cache cost little more than one. A block is a multiple of a
kernel's vector length, so each element meets the same code, vectorised or scalar, as in the whole
tensor: the bits are the same on any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from onpolicy.ops import Operators
from onpolicy.ops.base import Piece

BLOCKS = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Number of elements of a block; on a CPU, a few blocks of 256 KiB in float32 fit a core's cache."""

WORK = 10.0
"""Floating-point operations per element, roughly."""


def run_in_blocks(
    operators: Operators, work: Sequence[tuple[Callable[..., None], Sequence[Tensor]]]
) -> None:
    """Call each function on every block of its tensors: contiguous, of one size, this rank's part.

    Blocks are independent and run in no particular order.
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
