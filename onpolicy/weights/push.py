"""A push of every bucket to every engine, with proof that each holds exactly these bits.

The trainer's ranks share the engines: each sends to engines on its own host where it can.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol
from urllib.parse import urlsplit

from onpolicy.errors import EngineError, WeightSyncError
from onpolicy.system.network import is_of_this_host
from onpolicy.weights.digest import WeightBucket, WeightDigest

logger = logging.getLogger(__name__)


def as_it_is(bucket: WeightBucket) -> WeightBucket:
    """Return the bucket: everything of it is sent."""
    return bucket


def push_weights(
    buckets: Iterable[WeightBucket],
    engines: Sequence[Engine],
    transport: Transport,
    version: int,
    digest: WeightDigest | None = None,
    to_send: Callable[[WeightBucket], WeightBucket] = as_it_is,
) -> str:
    """Send weights as `version` to idle engines; return the digest of all weights that they hold.

    digest: of the weights that they already hold and that are not sent; the sent weights are added
    to it. None: nothing.
    to_send: what of a bucket travels (`weights/changes.py`); the digest is of all of it.

    Raise WeightSyncError if an engine's digest of the received weights differs from ours; the
    engine itself checks that it stored what it received. After any error the engines may hold a
    part of the weights; another push replaces all of them."""
    digest = WeightDigest() if digest is None else digest
    num_bytes, started = 0, time.perf_counter()

    try:
        if transport.in_session:
            on_all(engines, _begin)
        transport.open(engines)
        with ThreadPoolExecutor(1) as sender:
            sent: Future[None] | None = None
            # Gather one bucket from the trainer's shards while the previous one is being sent.
            for bucket in buckets:  # hashed while it is being sent
                if sent is not None:
                    sent.result()
                sent = sender.submit(transport.send, to_send(bucket), engines, version)
                for name, tensor in bucket:
                    digest.add(name, tensor)
                num_bytes += size_of(bucket)
            if sent is not None:
                sent.result()
        transport.close(engines, version)
        if transport.in_session:
            on_all(engines, lambda engine: engine.post("/end_weight_update", {}, num_bytes))
    except BaseException:
        transport.abandon()
        raise
    logger.debug(
        "weights of version %s, %d bytes, are in each of %d engines after %.3f s",
        version, num_bytes, len(engines), time.perf_counter() - started,
    )  # fmt: skip
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


def _begin(engine: Engine) -> None:
    """Open a session; close the one that a failed push left open in a surviving engine."""
    try:
        engine.post("/begin_weight_update", {})
    except EngineError:
        engine.post("/end_weight_update", {})
        engine.post("/begin_weight_update", {})


class Engine(Protocol):
    """The part of an engine's client that a push needs."""

    url: str

    def patience(self, num_bytes: int) -> float: ...
    def post(self, path: str, body: dict[str, Any], num_bytes: int = 0) -> dict[str, Any]: ...
    def report(self) -> dict[str, Any]: ...
    def flush_cache(self) -> None: ...


class Transport(ABC):
    """A way for buckets of weights to reach engines."""

    in_session = True
    """Whether newer SGLang needs begin_weight_update and end_weight_update around a push."""
    one_copy = False
    """Whether all engines near a rank read a single copy of the bytes (`weights/push.py`)."""

    def is_near(self, engine: Engine) -> bool:
        """Return whether a rank on this host should send to the engine, rather than one elsewhere."""
        return is_of_this_host(urlsplit(engine.url).hostname or "")

    def open(self, engines: Sequence[Engine]) -> None:
        """Prepare a push."""

    @abstractmethod
    def send(self, bucket: WeightBucket, engines: Sequence[Engine], version: int) -> None:
        """Load one bucket into every engine; it runs in a separate thread, one bucket at a time."""

    def close(self, engines: Sequence[Engine], version: int) -> None:
        """Finish a push."""

    def abandon(self) -> None:
        """Abort a failed push, so that nothing here or in an engine goes on waiting for it."""

    def end(self) -> None:
        """Free the resources that are kept between pushes; no other push follows."""


def size_of(bucket: WeightBucket) -> int:
    """Return the bytes of a bucket's tensors."""
    return sum(tensor.nbytes for _, tensor in bucket)


def on_all(engines: Sequence[Engine], call: Callable[[Engine], Any]) -> None:
    """Call every engine in parallel and wait for all; raise the first error."""
    if len(engines) == 1:  # most calls of a push take less time than a thread's start
        call(engines[0])
        return
    with ThreadPoolExecutor(max(len(engines), 1)) as pool:
        for future in [pool.submit(call, engine) for engine in engines]:
            future.result()


def share_out(near: Sequence[Sequence[bool]], *, one_copy: bool) -> list[int]:
    """Return the rank that sends to each engine: one on its host, or any if its host has none.
    near: for each rank, whether each engine is on its host. The engines of a host are spread over
    its ranks in order, so that with equally many ranks each gets the engine that shares its GPU.
    `one_copy`: the engines read the same bytes, which one rank provides for all of them."""
    everyone = tuple(range(len(near)))
    together: dict[tuple[int, ...], list[int]] = {}
    for engine in range(len(near[0])):
        on_its_host = tuple(rank for rank in everyone if near[rank][engine])
        together.setdefault(on_its_host or everyone, []).append(engine)
    sender = [0] * len(near[0])
    for ranks, engines in together.items():
        for place, engine in enumerate(engines):
            sender[engine] = ranks[0] if one_copy else ranks[place * len(ranks) // len(engines)]
    return sender
