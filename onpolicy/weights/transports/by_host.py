"""A transport by memory to this host's engines and by torch.distributed to others, in one push."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.push import Engine, Transport
from onpolicy.weights.transports.distributed import DistributedTransport


class ByHostTransport(Transport):
    """The transport `near` for engines on the trainer's host; the others form one group."""

    def __init__(self, near: Transport):
        self._near, self._far = near, DistributedTransport()
        self.one_copy = near.one_copy

    def open(self, engines: Sequence[Engine]) -> None:
        for way, theirs in self._ways(engines):
            way.open(theirs)

    def send(self, bucket: WeightBucket, engines: Sequence[Engine], version: int) -> None:
        for way, theirs in self._ways(engines):
            way.send(bucket, theirs, version)

    def close(self, engines: Sequence[Engine], version: int) -> None:
        for way, theirs in self._ways(engines):
            way.close(theirs, version)

    def abandon(self) -> None:
        self._near.abandon()
        self._far.abandon()

    def end(self) -> None:
        self._near.end()
        self._far.end()

    def _ways(self, engines: Sequence[Engine]) -> Iterator[tuple[Transport, list[Engine]]]:
        """Return the transports that have engines, each with those engines."""
        near = [engine for engine in engines if self.is_near(engine)]
        far = [engine for engine in engines if engine not in near]
        ways: tuple[tuple[Transport, list[Engine]], ...] = ((self._near, near), (self._far, far))
        return ((way, theirs) for way, theirs in ways if theirs)
