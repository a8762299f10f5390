"""What a trainer is asked to record of a forward pass, and what it has recorded (`onpolicy explain`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onpolicy.taps.evidence import Evidence
from onpolicy.taps.parts import Widths
from onpolicy.taps.recorder import Call, Recorder, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The fields of a `Recorder` that say what it is to keep."""

    shares: Mapping[Site, Mapping[int, Widths]] = field(default_factory=dict)
    ranks: int = 1
    suspect: tuple[Site, int, int] | None = None

    def recorder(self) -> Recorder:
        recorder = Recorder()
        recorder.shares, recorder.ranks, recorder.suspect = self.shares, self.ranks, self.suspect
        return recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a recorder has kept."""

    passes: list[list[Call]]
    """Of each forward pass."""

    evidence: Evidence | None
    objects: list[Any]

    @staticmethod
    def of_ranks(parts: Sequence[Recorded]) -> Recorded:
        """Of ranks each of which computes whole rows: all of them. Of a prefix that several ranks have,
        the evidence is the last one's, as its row is (`onpolicy.taps.recording.Rows.of`)."""
        found = next((part for part in reversed(parts) if part.evidence is not None), parts[0])
        return Recorded(
            passes=[calls for part in parts for calls in part.passes],
            evidence=found.evidence,
            objects=found.objects,
        )
