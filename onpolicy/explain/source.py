"""The first operator at which two recordings of the same tokens part.

Sites are looked at in the order in which a forward pass comes to them, so whatever a site was given was
made by sites before it, at its own position or, through attention, at an earlier one. The first site at
which anything differs, at any position up to the token's, is therefore where it began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from onpolicy.taps.recorder import HEAD, Site
from onpolicy.taps.recording import Numbers, Recording, Rows

Cause = Literal["operator", "key/value cache", "between operators", "not computed"]
"""operator: its output differs and its inputs do not. key/value cache: it attended to other keys or
values than were computed. between operators: its input differs, and no output before it does. not
computed: the rollout never computed the row, under this prefix."""

Differ = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where two recordings part."""

    cause: Cause
    site: Site
    before: Site | None
    """The site before it, None if it is the first."""

    position: int
    """Position in the sequence, prompt included, from 0."""

    key: int

    ranks: tuple[int, ...]
    """The rollout's tensor-parallel ranks on which it is so."""

    train_ranks: tuple[int, ...]
    """And the trainer's."""

    rollout_shape: tuple[int, ...]
    train_shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Example: 'linear of layers.0.self_attn.q_proj'"""
        return f"{self.site[1]} of {self.site[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCounts:
    """How many rows of a site both sides computed, and how many of them differ, on any rank."""

    site: Site
    rows: int
    inputs_differ: int
    outputs_differ: int

    own: int
    """Rows whose output differs though their inputs do not."""


@dataclass(frozen=True)
class _Rank:
    """A site's rows of some keys, as one rank of the rollout has them, and one of the trainer."""

    theirs: Rows
    ours: Rows
    keys: Numbers

    @cached_property
    def there(self) -> Numbers:
        return self.theirs.find(self.keys)

    @cached_property
    def at(self) -> Numbers:
        return self.ours.find(self.keys)

    @property
    def is_lost(self) -> Differ:
        return (self.at >= 0) & (self.there < 0)

    @cached_property
    def both(self) -> Differ:
        return (self.at >= 0) & (self.there >= 0)

    @property
    def inputs(self) -> Differ:
        return self._differ(self.theirs.inputs, self.ours.inputs)

    @property
    def stores(self) -> Differ:
        theirs, ours = self.theirs.store, self.ours.store
        if theirs is None or ours is None:
            return np.zeros(len(self.keys), dtype=bool)
        return self._differ(theirs, ours)

    @property
    def outputs(self) -> Differ:
        return self._differ(self.theirs.outputs, self.ours.outputs)

    def _differ(self, theirs: Numbers, ours: Numbers) -> Differ:
        differ: Differ = self.both & (theirs[self.there] != ours[self.at])
        return differ


Ranks = tuple[int, int]
"""A tensor-parallel rank of the rollout, and one of the trainer."""


def _by_rank(
    theirs: dict[int, Rows], ours: Sequence[dict[int, Rows]], keys: Numbers | None = None
) -> dict[Ranks, _Rank]:
    """What is compared of each two ranks that both sides have; `keys`: all of the trainer's, if not
    given."""
    return {
        (rank, number): _Rank(theirs[rank], rows, rows.keys if keys is None else keys)
        for number, own in enumerate(ours)
        for rank, rows in own.items()
        if rank in theirs
    }


def sites_of(train: Sequence[Recording]) -> list[Site]:
    """Those of all ranks of a trainer, in the order of a forward pass; blocks of a sum that ranks share
    have numbers of their own, and stand side by side."""
    places: dict[Site, int] = {}
    for recording in train:
        for place, site in enumerate(recording):
            places.setdefault(site, place)
    return sorted(places, key=places.__getitem__)


def first_source(
    rollout: Recording, train: Sequence[Recording], keys: Sequence[int]
) -> Source | None:
    """Where the rows of one sequence part; `keys`: of the tokens before the one that differs."""
    wanted, before = np.array(keys), None
    for site in sites_of(train):
        ours = [recording.get(site, {}) for recording in train]
        by_rank = _by_rank(rollout.get(site, {}), ours, wanted)
        if (found := _first(site, before, by_rank)) is not None:
            return found
        before = site if by_rank else before
    return None


def _first(site: Site, before: Site | None, by_rank: dict[Ranks, _Rank]) -> Source | None:
    # What a rank is given may be a part of what its result is made of, so all are asked each time.
    parts: list[tuple[Cause, dict[Ranks, Differ]]] = [
        # A prompt's tokens need no head.
        ("not computed", {r: x.is_lost & (site[0] != HEAD) for r, x in by_rank.items()}),
        ("between operators", {r: x.inputs for r, x in by_rank.items()}),
        ("key/value cache", {r: x.stores for r, x in by_rank.items()}),
        ("operator", {r: x.outputs for r, x in by_rank.items()}),
    ]
    for cause, differ in parts:
        if positions := [int(d.argmax()) for d in differ.values() if d.any()]:
            position = min(positions)
            found = [ranks for ranks, d in differ.items() if d[position]]
            x = by_rank[found[0]]
            return Source(
                cause=cause,
                site=site,
                before=before,
                position=position,
                key=int(x.keys[position]),
                ranks=tuple(sorted({rank for rank, _ in found})),
                train_ranks=tuple(sorted({number for _, number in found})),
                rollout_shape=_shape(x.theirs, x.there[position]),
                train_shape=_shape(x.ours, x.at[position]),
            )
    return None


def _shape(rows: Rows, where: int) -> tuple[int, ...]:
    return rows.shapes[int(rows.call[where])] if where >= 0 else ()


def count_sites(rollout: Recording, train: Sequence[Recording]) -> Iterator[SiteCounts]:
    """The counts of every site that both sides have."""
    for site in sites_of(train):
        ours = [recording.get(site, {}) for recording in train]
        if by_rank := list(_by_rank(rollout.get(site, {}), ours).values()):
            given = _any(x.inputs | x.stores for x in by_rank)
            made = _any(x.outputs for x in by_rank)
            yield SiteCounts(
                site=site,
                rows=int(_any(x.both for x in by_rank).sum()),
                inputs_differ=int(given.sum()),
                outputs_differ=int(made.sum()),
                own=int((made & ~given).sum()),
            )


def _any(parts: Iterable[Differ]) -> Differ:
    any_of_them: Differ = np.logical_or.reduce(list(parts))
    return any_of_them
