"""First operator at which two recordings of the same tokens diverge.

Sites are compared in the order of a forward pass, so the inputs of a site come from sites before
it, at its own position or, through attention, at an earlier one. The first site with any
difference, at any position up to the token's, is therefore the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from onpolicy.explain.taps.recorder import HEAD, HEAD_ADAPTER, Numbers, Recording, Rows, Site

Cause = Literal["not computed", "between operators", "key/value cache", "operator"]
"""not computed: the rollout never computed the row, under this prefix. between operators: its input
differs, and no output before it does. key/value cache: it attended to other keys or values than
were computed. operator: its output differs and its inputs do not."""

CAUSES: tuple[Cause, ...] = get_args(Cause)
"""The causes in the order in which they are tested at a site."""

Differ = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Source:
    """The place where two recordings diverge."""

    cause: Cause
    site: Site
    before: Site | None
    """The site before it, None if it is the first."""

    position: int
    """Position in the sequence, prompt included, from 0."""

    key: int

    ranks: tuple[int, ...] = (0,)
    """The rollout's tensor-parallel ranks that differ there."""

    train_ranks: tuple[int, ...] = (0,)
    """The trainer's ranks that differ there."""

    rollout_shape: tuple[int, ...] = ()
    train_shape: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Example: 'linear of layers.0.self_attn.q_proj'"""
        return f"{self.site[1]} of {self.site[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCounts:
    """Counts of a site's rows that both sides computed, and of those that differ on any rank."""

    site: Site
    rows: int
    inputs_differ: int
    outputs_differ: int

    own: int
    """Rows whose output differs though their inputs do not."""


class _Compared:
    """A site's rows of some keys, on one rank of the rollout and one rank of the trainer."""

    def __init__(self, theirs: Rows, ours: Rows, keys: Numbers):
        self.theirs, self.ours, self.keys = theirs, ours, keys
        self.there, self.here = theirs.find(keys), ours.find(keys)
        self.both: Differ = (self.there >= 0) & (self.here >= 0)
        self.differ: dict[Cause, Differ] = {
            "not computed": (self.there < 0) & (self.here >= 0),
            "between operators": self._differ(theirs.inputs, ours.inputs),
            "key/value cache": self._differ(theirs.store, ours.store),
            "operator": self._differ(theirs.outputs, ours.outputs),
        }

    def _differ(self, theirs: Numbers | None, ours: Numbers | None) -> Differ:
        if theirs is None or ours is None:
            return np.zeros(len(self.keys), dtype=bool)
        differ: Differ = self.both & (theirs[self.there] != ours[self.here])
        return differ


Ranks = tuple[int, int]
"""A tensor-parallel rank of the rollout, and one of the trainer."""


def _by_rank(
    rollout: Recording, train: Sequence[Recording], site: Site, keys: Numbers | None = None
) -> dict[Ranks, _Compared]:
    """Return the comparison for each pair of ranks that both have the site; `keys` defaults to all
    of the trainer's."""
    theirs = rollout.get(site, {})
    return {
        (rank, number): _Compared(theirs[rank], rows, rows.keys if keys is None else keys)
        for number, recording in enumerate(train)
        for rank, rows in recording.get(site, {}).items()
        if rank in theirs
    }


def sites_of(train: Sequence[Recording]) -> list[Site]:
    """Return the sites of all trainer ranks in the order of a forward pass; the blocks of a sum
    that ranks share have numbers of their own, and are adjacent."""
    places: dict[Site, int] = {}
    for recording in train:
        for place, site in enumerate(recording):
            places.setdefault(site, place)
    return sorted(places, key=places.__getitem__)


def first_source(
    rollout: Recording, train: Sequence[Recording], keys: Sequence[int]
) -> Source | None:
    """Return where the rows of one sequence diverge; `keys`: of the tokens before the differing
    one."""
    wanted, before = np.array(keys), None
    for site in sites_of(train):
        by_rank = _by_rank(rollout, train, site, wanted)
        if (found := _first(site, before, by_rank)) is not None:
            return found
        before = site if by_rank else before
    return None


def _first(site: Site, before: Site | None, by_rank: dict[Ranks, _Compared]) -> Source | None:
    for cause in CAUSES:  # of all ranks: one rank's input may be part of another's result
        differ = {ranks: x.differ[cause] for ranks, x in by_rank.items() if x.differ[cause].any()}
        if not differ or (cause == "not computed" and site[0] in (HEAD, HEAD_ADAPTER)):
            continue  # a prompt's tokens need no head
        position = min(int(d.argmax()) for d in differ.values())
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
            rollout_shape=x.theirs.shape(x.there[position]),
            train_shape=x.ours.shape(x.here[position]),
        )
    return None


def count_sites(rollout: Recording, train: Sequence[Recording]) -> Iterator[SiteCounts]:
    """Yield the counts of every site that both sides have."""
    for site in sites_of(train):
        if by_rank := _by_rank(rollout, train, site).values():
            both = np.any([x.both for x in by_rank], axis=0)
            given, stored, made = (
                np.any([x.differ[cause] for x in by_rank], axis=0) for cause in CAUSES[1:]
            )
            given |= stored
            yield SiteCounts(
                site=site,
                rows=int(both.sum()),
                inputs_differ=int(given.sum()),
                outputs_differ=int(made.sum()),
                own=int((made & ~given).sum()),
            )
