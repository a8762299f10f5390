"""Recording of one side: for every operator of every module, its rows by their keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from onpolicy.explain.taps.recorder import Call, Site
from onpolicy.explain.taps.rows import Widths

Numbers = NDArray[np.int64]

SUSPECT = "suspect"
"""The file beside a rollout engine's passes that names the call whose tensors are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one site, each key once: digests int64 [n], in the ascending order of `keys`."""

    keys: Numbers
    inputs: Numbers
    outputs: Numbers
    store: Numbers | None

    call: Numbers
    """The index in `shapes` of the shape in which each row was computed."""

    shapes: list[tuple[int, ...]]
    """Shapes of the first argument of each call."""

    widths: Widths
    """The widths of the last call."""

    def find(self, keys: Numbers) -> Numbers:
        """Return the index of each of `keys`, -1 if it is missing."""
        if not len(self.keys):
            return np.full(len(keys), -1)
        where = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return np.where(self.keys[where] == keys, where, -1)

    def shape(self, where: int) -> tuple[int, ...]:
        """Return the shape of the call that computed a row; an empty one for a missing row."""
        return self.shapes[int(self.call[where])] if where >= 0 else ()

    @staticmethod
    def of(calls: Sequence[Call]) -> Rows:
        """Return the rows of all calls; for a key that was computed more than once, the last."""
        number = np.repeat(np.arange(len(calls)), [len(call.keys) for call in calls])
        keys = torch.cat([call.keys for call in calls]).numpy()[::-1]
        keys, first = np.unique(keys, return_index=True)

        def column(parts: Iterable[Any]) -> Numbers:
            column: Numbers = torch.cat(list(parts)).numpy()[::-1][first]
            return column

        stores = [call.store for call in calls if call.store is not None]
        return Rows(
            keys=keys,
            inputs=column(call.inputs for call in calls),
            outputs=column(call.outputs for call in calls),
            store=column(stores) if stores else None,
            call=number[::-1][first],
            shapes=[call.shape for call in calls],
            widths=calls[-1].widths,
        )


class Recording(dict[Site, dict[int, Rows]]):
    """A mapping from sites, in the order of the first forward pass, to the rows of each rank."""

    @staticmethod
    def of(passes: Iterable[Sequence[Call]]) -> Recording:
        found: dict[Site, dict[int, list[Call]]] = {}
        for calls in passes:
            for call in calls:
                found.setdefault(call.site, {}).setdefault(call.rank, []).append(call)
        return Recording(
            {
                site: {rank: Rows.of(calls) for rank, calls in by_rank.items()}
                for site, by_rank in found.items()
            }
        )

    @property
    def ranks(self) -> int:
        """The number of tensor-parallel ranks of the recorded engine."""
        return 1 + max((rank for by_rank in self.values() for rank in by_rank), default=0)

    def shares(self) -> dict[Site, dict[int, Widths]]:
        """Return each rank's part of every site; empty where one rank has everything."""
        if self.ranks == 1:
            return {}
        return {
            site: {rank: rows.widths for rank, rows in by_rank.items()}
            for site, by_rank in self.items()
        }


def write_calls(calls: Sequence[Call], file: Path) -> None:
    """Write the calls of a pass, whole or not at all."""
    partial = file.with_suffix(".partial")
    torch.save([asdict(call) for call in calls], partial)
    partial.replace(file)


def read_calls(directory: Path) -> list[list[Call]]:
    """Return the passes in a directory, in order."""
    return [
        [Call(**record) for record in torch.load(file)] for file in sorted(directory.glob("*.pass"))
    ]
