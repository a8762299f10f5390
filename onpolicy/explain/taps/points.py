"""Recorders that change the rows on their way through a model, where operators take and leave them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onpolicy.explain.taps.recorder import INPUTS, Call, Recorder, Site, common_name
from onpolicy.explain.taps.rows import as_shaped, by_row
from onpolicy.explain.taps.scope import ALL_HERE, End, Together

Point = tuple[Site, End]
"""Where an operator takes its rows, or leaves them."""


Apart = tuple[Point, Tensor, list[Tensor]]
"""A point, int64 [n] the keys of its rows, and float64 [n, columns] of each of its tensors."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The rows of a point, each key once."""

    keys: Tensor
    """int64 [n], ascending."""

    rows: list[Tensor]
    """[n, columns] of each tensor that passes there."""

    def find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """(int64: where each of `keys` is, bool: whether it is there)"""
        where = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        return where, self.keys[where] == keys

    @staticmethod
    def of(keys: Tensor, rows: Sequence[Tensor]) -> Kept:
        """The rows by their keys; the last ones where a key comes several times."""
        unique, first = np.unique(keys.numpy()[::-1], return_index=True)
        order = torch.from_numpy(len(keys) - 1 - first)
        return Kept(torch.from_numpy(unique), [part[order] for part in rows])


KeptRows = dict[Point, Kept]


def gathered(parts: Iterable[tuple[Point, Tensor, Sequence[Tensor]]]) -> KeptRows:
    """All rows of (point, keys, rows) by points, in the order in which points first come."""
    found: dict[Point, list[tuple[Tensor, Sequence[Tensor]]]] = {}
    for point, keys, rows in parts:
        if rows:  # an embedding is given none
            found.setdefault(point, []).append((keys, rows))
    return {
        point: Kept.of(
            torch.cat([keys for keys, _ in calls]),
            [torch.cat(each) for each in zip(*(rows for _, rows in calls), strict=True)],
        )
        for point, calls in found.items()
    }


def kept_rows(passes: Iterable[Sequence[Call]]) -> KeptRows:
    """What a recorder with `keeps_rows` has of one rank's passes."""
    return gathered(
        part
        for calls in passes
        for call in calls
        if call.rows is not None
        for part in (
            ((call.site, "given"), call.keys, call.rows[0]),
            ((call.site, "made"), call.keys, call.rows[1]),
        )
    )


def in_both(one: KeptRows, other: KeptRows) -> tuple[KeptRows, KeptRows]:
    """Points that both have, in the order of the second, and of them the keys that both have."""
    ours: KeptRows = {}
    theirs: KeptRows = {}
    for point, mine in other.items():
        there = one.get(point)
        if there is None or _widths(there) != _widths(mine):
            continue
        where, found = there.find(mine.keys)
        if found.any():
            ours[point] = Kept(mine.keys[found], [rows[found] for rows in mine.rows])
            theirs[point] = Kept(mine.keys[found], [rows[where[found]] for rows in there.rows])
    return theirs, ours


def _widths(kept: Kept) -> list[int]:
    return [rows.shape[1] for rows in kept.rows]


@dataclass(frozen=True, slots=True)
class _Changed:
    """A call of an operator whose rows are changed."""

    name: str

    sites: Mapping[Site, Tensor | None]
    """Those that it computes at once, and int64: each one's columns of the result."""

    keys: Tensor
    together: Together


@dataclass(slots=True)
class Changing(Recorder):
    """Lets `change` decide what passes at every point."""

    def change(self, point: Point, keys: Tensor, rows: list[Tensor]) -> list[Tensor]:
        """[n, columns] of each tensor -> what goes on in its place; keys: int64 [n]."""
        raise NotImplementedError

    def run(self, name: str, right: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._pass is None or self._is_of_experts(name):
            return right(*args, **kwargs)
        scope = self._running(name)
        operator, where = common_name(name, args), INPUTS[name]
        given = scope.together.given(name, args)[where]
        keys = self._rows(name, given[0], scope)
        modules = scope.fused or {scope.module: None}
        number = scope.number(operator)
        sites = {(module, operator, number): own for module, own in modules.items()}
        call = _Changed(name, sites, keys, scope.together)
        others = list(args)
        others[where] = self._others(call, "given", given, args[where])
        out = right(*others, **kwargs)
        scope.counts[operator] += 1
        results = out if isinstance(out, tuple) else (out,)
        made = [scope.together.made(name, part) for part in results]
        found = self._others(call, "made", made, results)
        return tuple(found) if isinstance(out, tuple) else found[0]

    def add_embedding(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out if self._pass is None else self.passing("embed_tokens", "embedding", "made", out)

    def passing(self, module: str, operator: str, end: End, x: Tensor) -> Tensor:
        assert self._pass is not None
        call = _Changed(operator, {(module, operator, 0): None}, self._pass.keys, ALL_HERE)
        return self._others(call, end, (x,), (x,))[0]

    @property
    def takes_experts_whole(self) -> bool:
        return self.is_open

    def _others(
        self, call: _Changed, end: End, whole: Sequence[Tensor], parts: Sequence[Tensor]
    ) -> list[Tensor]:
        """What goes on in the place of this rank's `parts` of `whole`. Each site is given all columns,
        and has made its own."""
        keys, sites = call.keys, call.sites
        rows = [by_row(x, len(keys)).reshape(len(keys), -1) for x in whole]
        changed = rows
        for site, own in sites.items():
            if end == "given" or own is None:
                changed = self.change((site, end), keys, rows)
                continue
            found = self.change((site, end), keys, [x[:, own] for x in rows])
            changed = [x.index_copy(1, own, y) for x, y in zip(changed, found, strict=True)]
        shaped = [as_shaped(x, like) for x, like in zip(changed, whole, strict=True)]
        pairs = zip(shaped, parts, strict=True)
        return [call.together.own(call.name, end, x, part) for x, part in pairs]


@dataclass(slots=True)
class Forced(Changing):
    """Puts recorded rows in the place of the model's own, and keeps by how much they differ."""

    recorded: KeptRows = field(default_factory=dict)

    apart: list[Apart] = field(default_factory=list)
    """Each point with its keys: recorded less own, float64 [n, columns]; 0 where nothing is recorded."""

    def change(self, point: Point, keys: Tensor, rows: list[Tensor]) -> list[Tensor]:
        if (there := self.recorded.get(point)) is None:
            return rows
        where, found = there.find(keys)
        found = found[:, None]
        others = [other[where].to(own.device) for other, own in zip(there.rows, rows, strict=True)]
        pairs = list(zip(others, rows, strict=True))
        apart = [
            torch.where(found, other.double() - own.detach().double(), 0) for other, own in pairs
        ]
        if rows[0].is_floating_point():  # a choice is the recorded one, or not
            self.apart.append((point, keys, apart))
        return [torch.where(found, other.to(own.dtype), own) for other, own in pairs]


@dataclass(slots=True)
class Added(Changing):
    """Adds to what passes, with autograd; of a point of one pass one entry for each tensor."""

    values: Mapping[Point, Sequence[Tensor]] = field(default_factory=dict)

    def change(self, point: Point, keys: Tensor, rows: list[Tensor]) -> list[Tensor]:
        if point not in self.values:
            return rows
        return [own + value for own, value in zip(rows, self.values[point], strict=True)]
