"""How many rows of logits are alive at a time in training."""

from __future__ import annotations

CPU_LOGITS, GPU_LOGITS = 1 << 26, 1 << 27
"""Logits of a chunk, that a device's memory bears: 256 and 512 MiB of float32."""


def rows_of_logits(logits: int, vocab_size: int) -> int:
    """Rows of a chunk of at most so many logits.

    Every chunk reads the head twice and adds to its gradient, so few rows would cost more than
    their sums. A multiple of 64, so that GEMMs have full tiles.
    """
    return max(64, logits // vocab_size // 64 * 64)
