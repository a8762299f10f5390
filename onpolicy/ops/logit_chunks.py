"""The number of rows of logits that training holds at a time."""

from __future__ import annotations

CPU_LOGITS, GPU_LOGITS = 1 << 26, 1 << 27
"""Logits of a chunk that fit a device's memory: 256 and 512 MiB of float32."""


def rows_of_logits(logits: int, vocab_size: int) -> int:
    """Return the rows of a chunk of at most `logits` logits, a multiple of 64 for full GEMM tiles.

    Every chunk reads the head twice and adds to its gradient, so too few rows would cost more than
    their sums.
    """
    return max(64, logits // vocab_size // 64 * 64)
