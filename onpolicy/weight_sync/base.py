"""A push: every bucket to every engine, then proof that each holds exactly these bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from onpolicy.errors import WeightSyncError
from onpolicy.weights import WeightBucket, WeightDigest


class Engine(Protocol):
    """The part of an engine's client that a push needs."""

    url: str

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...
    def report(self) -> dict[str, Any]: ...
    def flush_cache(self) -> None: ...


class Transport(ABC):
    """A way for buckets of weights to reach engines."""

    in_session = True
    """Whether newer SGLang wants begin_weight_update and end_weight_update around it."""

    def open(self, engines: Sequence[Engine]) -> None:
        """Prepare a push."""

    @abstractmethod
    def send(self, bucket: WeightBucket, engines: Sequence[Engine], version: str) -> None:
        """Load one bucket into every engine."""

    def close(self, engines: Sequence[Engine], version: str) -> None:
        """Finish a push."""


def push_weights(
    buckets: Iterable[WeightBucket], engines: Sequence[Engine], transport: Transport, version: str
) -> str:
    """Send all weights as `version`; return their digest. The engines must be idle.

    Raises WeightSyncError if an engine's digest of what it received differs from ours; the engine
    itself checks that it stored what it received.
    """
    digest = WeightDigest()
    sessions = transport.in_session and bool(engines) and engines[0].report()["has_update_sessions"]
    if sessions:
        on_all(engines, lambda engine: engine.post("/begin_weight_update", {}))
    transport.open(engines)
    for bucket in buckets:
        for name, tensor in bucket:
            digest.add(name, tensor)
        transport.send(bucket, engines, version)
    transport.close(engines, version)
    if sessions:
        on_all(engines, lambda engine: engine.post("/end_weight_update", {}))
    on_all(engines, lambda engine: engine.flush_cache())
    for engine in engines:
        received = engine.report()["weights"]
        if received != digest.hexdigest():
            raise WeightSyncError(
                f"{engine.url}: weights={received} after push {version}, the trainer's are "
                f"{digest.hexdigest()}: the engine does not hold the weights that were sent. "
                "Look for loading errors in its log; the run cannot go on with it."
            )
    return digest.hexdigest()


def on_all(engines: Sequence[Engine], call: Callable[[Engine], Any]) -> None:
    """Call every engine at the same time and wait for all; raises the first error."""
    with ThreadPoolExecutor(max(len(engines), 1)) as pool:
        for future in [pool.submit(call, engine) for engine in engines]:
            future.result()
