"""What a trainer is asked to record of a forward pass, and what it has recorded (`onpolicy explain`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onpolicy.taps.evidence import Evidence
from onpolicy.taps.parts import Widths
from onpolicy.taps.recorder import Call, Recorder, Site
from onpolicy.taps.recording import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The fields of a `Recorder` that say what it is to keep."""

    shares: Mapping[Site, Mapping[int, Widths]] = field(default_factory=dict)
    ranks: int = 1
    suspect: tuple[Site, int, int] | None = None

    of_rank: int = 0
    """The tensor-parallel rank of the trainer whose evidence is wanted."""

    def recorder(self) -> Recorder:
        recorder = Recorder()
        recorder.shares, recorder.ranks, recorder.suspect = self.shares, self.ranks, self.suspect
        return recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What recorders have kept."""

    passes: dict[int, list[list[Call]]]
    """Each forward pass of each tensor-parallel rank of the trainer. Every one has whole rows."""

    evidence: Evidence | None
    objects: list[Any]

    def recordings(self) -> list[Recording]:
        """The recordings, in the order of the tensor-parallel ranks."""
        return [Recording.of(passes) for _, passes in sorted(self.passes.items())]

    @staticmethod
    def of_ranks(parts: Sequence[Recorded]) -> Recorded:
        """What ranks have together, each of which has some rows and layers. Of a prefix that several
        have, the evidence is the last one's, as its row is (`onpolicy.taps.recording.Rows.of`)."""
        found = next((part for part in reversed(parts) if part.evidence is not None), parts[0])
        passes: dict[int, list[list[Call]]] = {}
        for part in parts:
            for rank, own in part.passes.items():
                passes.setdefault(rank, []).extend(own)
        return Recorded(passes=passes, evidence=found.evidence, objects=found.objects)
