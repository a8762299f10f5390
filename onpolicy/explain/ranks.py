"""Rows of a rollout's tensor-parallel ranks, put together as one rank with all would have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from onpolicy.explain.taps.points import Kept, KeptRows, Point, kept_rows
from onpolicy.explain.taps.recorder import Call
from onpolicy.explain.taps.rows import Part


def rows_by_rank(passes: Iterable[Sequence[Call]]) -> list[KeptRows]:
    """The rows that each rank of an engine has kept, in the order of ranks."""
    of_ranks: dict[int, list[Sequence[Call]]] = {}
    for calls in passes:
        if calls:
            of_ranks.setdefault(calls[0].rank, []).append(calls)
    return [kept_rows(own) for _, own in sorted(of_ranks.items())]


def joined(by_rank: Sequence[KeptRows], whole: KeptRows) -> tuple[KeptRows, list[Point]]:
    """(rows as wide as those of `whole`, points at which ranks that have all of a row have other ones).

    There the first rank's are taken. What is no part of the rows of `whole` is left out.
    """
    if len(by_rank) == 1:
        return by_rank[0], []
    rows: KeptRows = {}
    differ: list[Point] = []
    for point, mine in whole.items():
        parts = [own[point] for own in by_rank if point in own]
        if len(parts) < len(by_rank):
            continue
        try:
            rows[point], are_equal = _join(parts, [x.shape[1] for x in mine.rows])
        except LookupError:
            continue
        if not are_equal:
            differ.append(point)
    return rows, differ


def _join(parts: Sequence[Kept], widths: Sequence[int]) -> tuple[Kept, bool]:
    """Rows of the keys that all ranks have, and whether what several have is the same."""
    keys = parts[0].keys
    keys = keys[torch.stack([part.find(keys)[1] for part in parts]).all(0)]
    of_ranks = [[rows[part.find(keys)[0]] for rows in part.rows] for part in parts]
    pairs = zip(zip(*of_ranks, strict=True), widths, strict=True)
    found = [_whole(tensors, width) for tensors, width in pairs]
    return Kept(keys, [rows for rows, _ in found]), all(are_equal for _, are_equal in found)


def _whole(parts: Sequence[Tensor], width: int) -> tuple[Tensor, bool]:
    first = parts[0]
    whole = first.new_empty(len(first), width)
    for rank, rows in enumerate(parts):
        part = Part(rank=rank, ranks=len(parts), widths=((), (), (rows.shape[1],)))
        columns = part.of_result(0, width)
        if columns is None:
            return first, all(torch.equal(rows, first) for rows in parts)
        whole[:, columns] = rows[:, : len(columns)]
    return whole, True
