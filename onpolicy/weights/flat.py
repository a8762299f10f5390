"""A bucket as one row of bytes and a table of what lies where: one handle or broadcast for all of it.

The layout is that of SGLang's load format "flattened_bucket": tensors end to end, nothing between them.
An engine looks at its bytes in place, so each tensor must begin at a multiple of its items' size: those
of larger items come first.
Source: sglang/srt/weight_sync/tensor_bucket.py.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from onpolicy.weights.digest import WeightBucket

LOAD_FORMAT = "flattened_bucket"


def in_order(bucket: WeightBucket) -> WeightBucket:
    """The bucket in the order in which it is laid out."""
    return sorted(bucket, key=lambda named: -named[1].itemsize)


def as_bytes(bucket: WeightBucket) -> list[Tensor]:
    """The bytes of each tensor: uint8 [bytes], a view where it is contiguous."""
    return [tensor.detach().flatten().view(torch.uint8) for _, tensor in bucket]


def flatten(bucket: WeightBucket, out: Tensor | None = None) -> Tensor:
    """The bytes of a bucket that is in order: uint8 [bytes], where its tensors are, or in `out`."""
    parts = as_bytes(bucket)
    if out is None or out.device == parts[0].device:
        return torch.cat(parts, out=out)
    return out.copy_(torch.cat(parts))


class Buffer:
    """Host memory for one bucket after the other, of all pushes: to be given new pages takes several
    times as long as to copy a bucket into pages that are there."""

    def __init__(self, make: Callable[[int], Tensor]):
        """`make`: (bytes) -> uint8 [bytes]"""
        self._make = make
        self._memory = torch.empty(0, dtype=torch.uint8)

    def fill(self, bucket: WeightBucket) -> Tensor:
        """The bytes of a bucket that is in order: uint8 [bytes], until the next one."""
        num_bytes = sum(tensor.nbytes for _, tensor in bucket)
        if num_bytes > len(self._memory):
            self.free()
            self._memory = self._make(num_bytes)
        return flatten(bucket, out=self._memory[:num_bytes])

    def free(self) -> None:
        """Leave the memory to those who still look at it."""
        self._memory = torch.empty(0, dtype=torch.uint8)


def table(bucket: WeightBucket) -> list[SimpleNamespace]:
    """Name, shape, dtype and place of each tensor of a bucket that is in order.

    SGLang reads these fields, and unpickles this class too: its own would have to be imported, and with
    it all of SGLang, which changes transformers where it is.
    """
    rows, start = [], 0
    for name, tensor in bucket:
        end = start + tensor.nbytes
        rows.append(
            SimpleNamespace(
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                start_idx=start,
                end_idx=end,
                numel=end - start,
            )
        )
        start = end
    return rows
