"""Uniform numbers that depend only on a seed and a position, as PyTorch computes them on any device."""

from __future__ import annotations

import torch
from torch import Tensor

GAMMA, FIRST, SECOND = (
    x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""SplitMix64's constants, as int64."""


def uniform_numbers(seeds: Tensor, positions: Tensor) -> Tensor:
    """Compute `Operators.uniform`."""
    state = splitmix64(splitmix64(seeds) + positions.to(torch.int64))
    return _shift_right(state, 11).double() / (1 << 53)


def splitmix64(x: Tensor) -> Tensor:
    """Apply SplitMix64 to int64, which wraps.

    Source: Steele et al., Fast splittable pseudorandom number generators (OOPSLA 2014).
    """
    x = x + GAMMA
    x = (x ^ _shift_right(x, 30)) * FIRST
    x = (x ^ _shift_right(x, 27)) * SECOND
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right logically; torch's own shift is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
