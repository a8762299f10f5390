"""Sums over a sharded K whose bits do not depend on the tensor-parallel degree.

A row-parallel linear sums over K, and tensor parallelism shards K. An all-reduce of rounded parts
would give each degree bits of its own. Here K is always cut into the same number of blocks, which
the contract fixes, and the blocks' float32 products are added along a fixed binary tree. A rank
holds a whole subtree: it adds up its own blocks, all ranks exchange one float32 partial sum each,
and every rank computes the rest of the same tree. A single rank computes all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.errors import ContractError


@dataclass(frozen=True, slots=True)
class RowParallel:
    """The partition of a sum over K: `blocks` in all, shared equally by the ranks of `group`."""

    blocks: int = 1
    """Number of blocks of K over all ranks, a power of two; the contract's `row_parallel_blocks`."""

    group: dist.ProcessGroup | None = None
    """Tensor-parallel group; None: this process holds all of K."""

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.blocks & (self.blocks - 1) or self.blocks % self.ranks:
            raise ContractError(
                f"row_parallel_blocks={self.blocks}: must be a power of two, and {self.ranks} "
                "tensor-parallel ranks must share it equally. Start both engines with another "
                "--row-parallel-blocks, or a number of ranks that divides it."
            )

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def first_block(self) -> int:
        """Return the index of this rank's first block among all ranks' blocks."""
        rank = 0 if self.group is None else self.group.rank()
        return rank * (self.blocks // self.ranks)

    def blocks_of(self, size: int) -> int:
        """Return the number of this rank's blocks in its `size` = K / ranks.

        Raise ContractError if they cannot be equal.
        """
        mine = self.blocks // self.ranks
        if size % mine:
            raise ContractError(
                f"row_parallel_blocks={self.blocks}: {mine} of them cannot be equal parts of an "
                f"axis of {size}. Start both engines with a smaller --row-parallel-blocks."
            )
        return mine

    def block_of(self, size: int) -> int:
        """Return the length of each block."""
        return size // self.blocks_of(size)

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Return this rank's blocks of the last axis: [..., K / ranks] -> [..., K / blocks] each."""
        return x.chunk(self.blocks_of(x.shape[-1]), dim=-1)

    def own_part(self, x: Tensor, size: int) -> Tensor:
        """Return this rank's `size` columns of [..., K]; `x` itself if it has no others."""
        if self.group is None or x.shape[-1] != size * self.ranks:
            return x
        return x.chunk(self.ranks, dim=-1)[self.group.rank()]

    def sum(self, partials: Sequence[Tensor]) -> Tensor:
        """Add this rank's float32 partials and the other ranks' along the tree."""
        mine = tree_sum(partials)
        return mine if self.ranks == 1 else _GatheredSum.apply(mine, self.group)


WHOLE = RowParallel()
"""The partition of a linear that tensor parallelism does not shard along K: one sum over all of it."""


def tree_sum(terms: Sequence[Tensor] | Tensor) -> Tensor:
    """Add neighbours, then neighbouring sums, and so on; the number of terms is a power of two.

    Terms in one tensor, [terms, ...], are added a level at a time, with one kernel per level.
    """
    while len(terms) > 1:
        if isinstance(terms, Tensor):
            terms = terms[::2] + terms[1::2]
        else:
            terms = [left + right for left, right in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


class _GatheredSum(torch.autograd.Function):
    """The tree sum over ranks. Each rank's partial enters once and gets the whole gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        partial = partial.contiguous()
        # Gather into one tensor, since a CUDA graph cannot hold the copies into a list of tensors.
        gathered = partial.new_empty(group.size() * len(partial), *partial.shape[1:])
        dist.all_gather_into_tensor(gathered, partial, group=group)
        return tree_sum(gathered.view(group.size(), *partial.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
