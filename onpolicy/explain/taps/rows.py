"""What a row is known by, and a digest of its numbers.

A row of a causal model is a function of a token and of the tokens before it, and of nothing else. So it
is known by a key of that prefix: the rows of a trainer's packed batch, of a prefill chunk and of a
decoding batch meet under the same key, and so do those of two requests that share a prefix, of which an
engine with a prefix cache computes one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_CHUNK = 1 << 22
"""Numbers that are digested at once: their 64-bit products take 32 MiB."""


def prefix_keys(tokens: Iterable[int], before: int = 0) -> list[int]:
    """The key of each token, after a prefix of the key `before` (0: none); they fit int64."""
    keys = []
    for token in tokens:
        before = ((before ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x94D049BB133111EB) & _MASK
        before ^= before >> 29
        keys.append(before - (1 << 64) if before >> 63 else before)
    return keys


def digest(rows: Tensor) -> Tensor:
    """[n, ...] of any dtype that float32 holds -> int64 [n] on the CPU.

    A sum over a row of bits x odd numbers, modulo 2^64: one number that changes always shows, more of
    them all but always. Zeros are one number, whatever their sign, as are bfloat16 and float32 of one
    value.
    """
    rows = rows.detach().reshape(len(rows), -1)
    odd = odd_numbers(max(rows.shape[1], 1), rows.device)[: rows.shape[1]]
    step = max(1, _CHUNK // max(rows.shape[1], 1))
    parts = [
        ((part.float() + 0.0).view(torch.int32).long() * odd).sum(1) for part in rows.split(step)
    ]
    return torch.cat(parts).cpu()


@lru_cache(maxsize=256)
def odd_numbers(count: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 [count]: the first of one fixed sequence."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator).to(device) * 2 + 1


def by_row(x: Tensor, count: int) -> Tensor:
    """`x` as [count, ...], whichever axis but the last its rows are on: [1, H, T, D] -> [T, H, 1, D].

    Of three axes tokens are before heads. Of four, where rotary's are the other way round, an axis of as
    many heads as there are tokens lies closer together in memory.
    """
    if x.dim() == 1:
        return x[:, None]
    axes = [axis for axis in range(x.dim() - 1) if x.shape[axis] == count]
    if count == 1 or not axes:
        return x.reshape(count, -1)
    return x.movedim(axes[0] if x.dim() == 3 else max(axes, key=x.stride), 0)
