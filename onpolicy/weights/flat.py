"""A bucket as one row of bytes with a table of its tensors, for one handle or broadcast per bucket.

The layout is SGLang's load format "flattened_bucket": tensors end to end, without gaps. An engine
views the bytes in place, so each tensor must begin at a multiple of its item size; so tensors with
larger items come first.
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
    """Return the bucket in the order of its layout."""
    return sorted(bucket, key=lambda named: -named[1].itemsize)


def as_bytes(bucket: WeightBucket) -> list[Tensor]:
    """Return the bytes of each tensor: uint8 [bytes], a view where it is contiguous."""
    return [tensor.detach().flatten().view(torch.uint8) for _, tensor in bucket]


def flatten(bucket: WeightBucket, out: Tensor | None = None) -> Tensor:
    """Return the bytes of an ordered bucket: uint8 [bytes], on its device, or in `out`."""
    parts = as_bytes(bucket)
    if out is None or out.device == parts[0].device:
        return torch.cat(parts, out=out)
    return out.copy_(torch.cat(parts))


class Buffer:
    """Host memory that the buckets of all pushes reuse.

    Allocating new pages takes several times as long as copying a bucket into existing ones.
    """

    def __init__(self, make: Callable[[int], Tensor]):
        """Take the allocator `make`: (bytes) -> uint8 [bytes]."""
        self._make = make
        self._memory = torch.empty(0, dtype=torch.uint8)

    def fill(self, bucket: WeightBucket) -> Tensor:
        """Return the bytes of an ordered bucket: uint8 [bytes], valid until the next call."""
        num_bytes = sum(tensor.nbytes for _, tensor in bucket)
        if num_bytes > len(self._memory):
            self.free()
            self._memory = self._make(num_bytes)
        return flatten(bucket, out=self._memory[:num_bytes])

    def free(self) -> None:
        """Drop the memory; it lives on while others still read it."""
        self._memory = torch.empty(0, dtype=torch.uint8)


def table(bucket: WeightBucket) -> list[SimpleNamespace]:
    """Return name, shape, dtype and place of each tensor of an ordered bucket.

    SGLang reads these fields, and unpickles this class too. Its own class would need an import of
    all of SGLang, which changes transformers in this process.
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
