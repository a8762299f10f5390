"""Digests of whole rows of log-probabilities, for engines and trainer to compare without the rows.

A digest is the sum of all entries' float32 bits, each times an odd number of its own, modulo 2^64. So
one changed entry always gives another digest, and several do except by a chance of about 2^-32 to
2^-64. Integers add up to the same sum in any order, on any device, over any chunks of the vocabulary.
It guards against mistakes, not against an attacker.

xxh3, which pushes use, is faster on a CPU, but a GPU would launch its kernels for every row.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from onpolicy.ops.uniform_numbers import splitmix64

NO_DIGEST = 0
"""The digest of a row that has a NaN, or that nobody digested; it equals none, not even itself."""

NUMBERS = 1 << 22
"""Number of entries that are widened at a time: 32 MiB of int64."""


def row_digests(log_probs: Tensor) -> Tensor:
    """Return the digest of each row: float32 [M, V] -> int64 [M]; NO_DIGEST for one with a NaN.

    The rows may lie in a larger tensor. -0.0 is not 0.0, and a row is not one with more columns.
    """
    count, size = log_probs.shape
    if log_probs.dtype != torch.float32:
        raise TypeError(f"log_probs={log_probs.dtype}: digests are of the operators' float32.")
    bits, factors = log_probs.view(torch.int32), _factors(size, log_probs.device)
    total = splitmix64(factors.new_full((count,), size))
    step = max(1, NUMBERS // max(count, 1))
    for first in range(0, size, step):
        part = slice(first, first + step)
        total += bits[:, part].long().mul_(factors[part]).sum(-1)
    return total.masked_fill(log_probs.sum(-1).isnan(), NO_DIGEST)


@lru_cache(maxsize=4)
def _factors(size: int, device: torch.device) -> Tensor:
    """Return an odd number for each column: int64 [V]."""
    return splitmix64(torch.arange(size, device=device)) | 1
