"""The first operator at which two recordings of the same tokens part.

Sites are looked at in the order in which a forward pass comes to them, so whatever a site was given was
made by sites before it, at its own position or, through attention, at an earlier one. The first site at
which anything differs, at any position up to the token's, is therefore where it began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    rollout_shape: tuple[int, ...]
    train_shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Example: 'linear of layers.0.self_attn.q_proj'"""
        return f"{self.site[1]} of {self.site[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCounts:
    """How many rows of a site both sides computed, and how many of them differ."""

    site: Site
    rows: int
    inputs_differ: int
    outputs_differ: int

    own: int
    """Rows whose output differs though their inputs do not."""


def first_source(rollout: Recording, train: Recording, keys: Sequence[int]) -> Source | None:
    """Where the rows of one sequence part; `keys`: of the tokens before the one that differs."""
    wanted, before = np.array(keys), None
    for site, ours in train.items():
        theirs = rollout.get(site)
        if theirs is None:
            continue
        at, there = ours.find(wanted), theirs.find(wanted)
        if (found := _first(site, before, theirs, ours, there, at, wanted)) is not None:
            return found
        before = site
    return None


def _first(
    site: Site,
    before: Site | None,
    theirs: Rows,
    ours: Rows,
    there: Numbers,
    at: Numbers,
    keys: Numbers,
) -> Source | None:
    is_lost = (at >= 0) & (there < 0) & (site[0] != HEAD)  # a prompt's tokens need no head
    both = (at >= 0) & (there >= 0)
    parts: list[tuple[Cause, Differ]] = [
        ("not computed", is_lost),
        ("between operators", both & (theirs.inputs[there] != ours.inputs[at])),
        ("key/value cache", both & _stores_differ(theirs, ours, there, at)),
        ("operator", both & (theirs.outputs[there] != ours.outputs[at])),
    ]
    for cause, differ in parts:
        if differ.any():
            position = int(differ.argmax())
            return Source(
                cause=cause,
                site=site,
                before=before,
                position=position,
                key=int(keys[position]),
                rollout_shape=() if cause == "not computed" else _shape(theirs, there[position]),
                train_shape=_shape(ours, at[position]),
            )
    return None


def _shape(rows: Rows, where: int) -> tuple[int, ...]:
    return rows.shapes[int(rows.call[where])]


def _stores_differ(theirs: Rows, ours: Rows, there: Numbers, at: Numbers) -> Differ:
    if theirs.store is None or ours.store is None:
        return np.zeros(len(at), dtype=bool)
    differ: Differ = theirs.store[there] != ours.store[at]
    return differ


def count_sites(rollout: Recording, train: Recording) -> Iterator[SiteCounts]:
    """Of every site that both sides have."""
    for site, ours in train.items():
        if (theirs := rollout.get(site)) is None:
            continue
        there = theirs.find(ours.keys)
        at = (there >= 0).nonzero()[0]
        there = there[at]
        given = (theirs.inputs[there] != ours.inputs[at]) | _stores_differ(theirs, ours, there, at)
        made = theirs.outputs[there] != ours.outputs[at]
        yield SiteCounts(
            site=site,
            rows=len(at),
            inputs_differ=int(given.sum()),
            outputs_differ=int(made.sum()),
            own=int((made & ~given).sum()),
        )
