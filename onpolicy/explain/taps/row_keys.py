"""Keys of rows, and digests of a call's inputs and results, row by row.

A row of a causal model is a function of a token and of the tokens before it, and of nothing else.
So its key is a hash of that prefix: the rows of a trainer's packed batch, of a prefill chunk and of
a decoding batch meet under the same key, and so do the rows of two requests that share a prefix, of
which an engine with a prefix cache computes one.

A tensor-parallel rank of the rollout has a part of most rows. A trainer whose operator computes
several sites at once (queries, keys and values by one product) has them side by side. So a
trainer's results are digested part by part, with the rollout's columns, and only equal parts are
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from onpolicy.ops.layouts import AttentionLayout, PagedLayout

_MASK = (1 << 64) - 1
_CHUNK = 1 << 22
"""Numbers that are digested at once: their 64-bit products take 32 MiB."""

Columns = Callable[[int, int], Tensor | None]
"""(number of a tensor, its columns) -> int64, the wanted columns; None: all."""

Widths = tuple[tuple[int, ...], ...]
"""The numbers of columns of a call's tensors: inputs, keys and values, results."""


def prefix_keys(tokens: Iterable[int], before: int = 0) -> list[int]:
    """Return the key of each token, after a prefix with key `before` (0: none); they fit int64."""
    keys = []
    for token in tokens:
        before = ((before ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x94D049BB133111EB) & _MASK
        before ^= before >> 29
        keys.append(before - (1 << 64) if before >> 63 else before)
    return keys


def digest(rows: Tensor) -> Tensor:
    """Return a digest of rows: [n, ...] of any dtype that float32 holds -> int64 [n] on the CPU.

    It is the sum over a row of bits x odd numbers, modulo 2^64: one number that changes always
    shows, more of them all but always. Zeros of either sign are equal, as are bfloat16 and float32
    of one value.
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
    """Return int64 [count], the first numbers of one fixed sequence."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator).to(device) * 2 + 1


def by_row(x: Tensor, count: int) -> Tensor:
    """Return `x` as [count, ...], whichever axis but the last its rows are on: [1, H, T, D] -> [T,
    H, 1, D].

    With three axes tokens come before heads. With four, where rotary's are the other way round, an
    axis of heads as long as the token axis has the smaller stride.
    """
    if x.dim() == 1:
        return x[:, None]
    axis = _axis_of_rows(x, count)
    return x.reshape(count, -1) if axis is None else x.movedim(axis, 0)


def _axis_of_rows(x: Tensor, count: int) -> int | None:
    axes = [axis for axis in range(x.dim() - 1) if x.shape[axis] == count]
    if count == 1 or not axes:
        return None
    return axes[0] if x.dim() == 3 else max(axes, key=x.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of a call's rows that one site has on one rank.

    Its methods are `Columns`, and raise LookupError if the rank has neither all nor an equal part.
    """

    rank: int = 0
    ranks: int = 1

    widths: Widths | None = None
    """The widths of the rank's part; None: all of every row."""

    fused: Tensor | None = None
    """int64, the columns of the result for this site; None: all."""

    pieces: int = 1
    """Adjacent parts of the result, each of which is sharded over the ranks: gate and up."""

    @property
    def has_store(self) -> bool:
        """Whether the rank has recorded keys and values."""
        return self.widths is None or bool(self.widths[1])

    def of_input(self, number: int, width: int) -> Tensor | None:
        return self._columns(0, number, width)

    def of_store(self, number: int, width: int) -> Tensor | None:
        return self._columns(1, number, width)

    def of_result(self, number: int, width: int) -> Tensor | None:
        if self.fused is None:
            return self._columns(2, number, width, self.pieces)
        own = self._columns(2, number, len(self.fused), self.pieces)
        return self.fused if own is None else self.fused[own]

    def _columns(self, kind: int, number: int, width: int, pieces: int = 1) -> Tensor | None:
        if self.widths is None or self.widths[kind][number] == width:
            return None
        each, part = width // pieces, self.widths[kind][number] // pieces
        # The last rank's part may be padded, as a vocabulary is, by zeros, whose digest is 0.
        if not part * (self.ranks - 1) < each <= part * self.ranks:
            raise LookupError(f"{part} columns of {each} on each of {self.ranks} ranks")
        own = torch.arange(each)[self.rank * part : (self.rank + 1) * part]
        return torch.cat([own + piece * each for piece in range(pieces)])


def cut(rows: Tensor, columns: Tensor | None) -> Tensor:
    """Return the given columns of rows: [n, C] -> [n, c]"""
    return rows if columns is None else rows[:, columns.to(rows.device)]


class Tensors:
    """The tensors of one call, whose rows have keys."""

    def __init__(self, tensors: Sequence[Tensor], count: int, expert_order: Tensor | None = None):
        """Take the tensors. count: rows with a key; expert_order: int64 [count * k], the (token,
        choice) of each row where experts have sorted them."""
        self._count, self._order = count, expert_order
        self._tensors = [self._flat(x.detach()) for x in tensors]
        self._whole: dict[int, Tensor] = {}

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(rows.shape[1] for rows in self._tensors)

    def digest(self, columns: Columns = lambda *_: None) -> Tensor:
        """Return int64 [count], the digest over all tensors."""
        total = torch.zeros(self._count, dtype=torch.int64)
        for number, width in enumerate(self.widths):
            part = self._digest(number, columns(number, width))
            total = total * 0x5851F42D4C957F2D + part + number
        return total

    def _digest(self, number: int, columns: Tensor | None) -> Tensor:
        if columns is not None:
            return self._by_token(digest(cut(self._tensors[number], columns)))
        if number not in self._whole:
            self._whole[number] = self._by_token(digest(self._tensors[number]))
        return self._whole[number]

    def _flat(self, x: Tensor) -> Tensor:
        rows = x if self._is_sorted(x) else by_row(x, self._count)
        return rows.reshape(len(rows), -1)

    def _is_sorted(self, x: Tensor) -> bool:
        return self._order is not None and len(x) == len(self._order)

    def _by_token(self, digests: Tensor) -> Tensor:
        if self._order is None or not self._is_sorted(digests):
            return digests
        chosen = len(digests) // self._count
        parts = digests * odd_numbers(chosen)[self._order % chosen]
        return torch.zeros(self._count, dtype=torch.int64).index_add_(
            0, self._order // chosen, parts
        )


def rows_of_token(order: Tensor, token: int, chosen: int) -> list[int]:
    """Return the indices of a token's rows sorted by experts, in the order of its choices."""
    where = (order // chosen == token).nonzero()[:, 0]
    rows: list[int] = where[order[where].argsort()].tolist()
    return rows


class Store:
    """The keys and values of a call of attention."""

    def __init__(self, k: Tensor, v: Tensor, layout: AttentionLayout | PagedLayout):
        k, v, self._layout = by_rows(k, v, layout)
        pairs = zip(self._layout.key_rows, self._layout.key_lens, strict=True)
        rows = torch.cat([where[:n] for where, n in pairs])
        self._seen = [x[rows].flatten(1) for x in (k, v)]

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(x.shape[1] for x in self._seen)

    def digest(self, columns: Columns) -> Tensor:
        """Return int64 [T], the digest of the keys and values at all positions up to each query's
        own."""
        k, v = (digest(cut(x, columns(n, x.shape[1]))) for n, x in enumerate(self._seen))
        lens = self._layout.key_lens
        odd = odd_numbers(max(lens))
        each = (k * 0x2545F4914F6CDD1D + v).split(list(lens))
        sums = [(part * odd[: len(part)]).cumsum(0) for part in each]
        ends = zip(sums, self._layout.query_lens, strict=True)
        return torch.cat([s[len(s) - n :] for s, n in ends])


def by_rows(
    k: Tensor, v: Tensor, layout: AttentionLayout | PagedLayout
) -> tuple[Tensor, Tensor, AttentionLayout]:
    """Return keys and values [n, H, D] and their layout, with pages laid end to end."""
    if isinstance(layout, PagedLayout):
        return k.flatten(0, 1), v.flatten(0, 1), layout.by_rows()
    return k, v, layout
