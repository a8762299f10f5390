"""Hand-over of a trainer's weights: to the engines, or into an exported checkpoint.

The ranks gather them together, a bucket at a time. Each rank sends them to its own engines
(`weights/senders.py`), which prove receipt by a digest; then all ranks compare the digests. Frozen
weights go only to engines that do not hold them yet; engines without adapters get all weights, merged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import WeightSyncError
from onpolicy.models.export import export_checkpoint
from onpolicy.models.lora.peft_format import export_adapter
from onpolicy.train import distributed
from onpolicy.train.merging import MergedPush
from onpolicy.weights.digest import WeightBucket, WeightDigest, WeightPart
from onpolicy.weights.kept import KeptWeights
from onpolicy.weights.push import Engine, push_weights
from onpolicy.weights.rounding import format_of_push, rounded
from onpolicy.weights.senders import share_out
from onpolicy.weights.transports import make_transport, shares_gpus

MIB = 1 << 20


class WeightSource(Protocol):
    """The part of a `ShardedModel` that provides weights."""

    def weight_buckets(
        self,
        max_bytes: int,
        part: WeightPart = ...,
        ranks: Collection[int] = ...,
        masters: bool = ...,
    ) -> Iterator[WeightBucket]: ...
    def frozen_digest(self) -> str: ...


class WeightOutlet:
    """Gathering and hand-over of the ranks' weights; every method is collective."""

    def __init__(self, config: TrainConfig, contract: NumericsContract, source: WeightSource):
        self.config, self._source = config, source
        self._max_bytes = bucket_bytes(config)
        directory = Path(config.output.run_dir)
        on_gpus = shares_gpus(config, contract.device)
        self.transport = make_transport(config.sync.weight_sync, directory, on_gpus=on_gpus)
        self._kept: dict[WeightPart, KeptWeights] = {
            "frozen": KeptWeights(directory), "trained": KeptWeights(directory)
        }  # fmt: skip
        self._keepers = {0} if config.plan.may_lag else set()
        self._adapter = contract.adapter
        self._merging: MergedPush | None = None
        if self._adapter is not None:
            self._merging = MergedPush(config.model, self._adapter)
        self.metrics: dict[str, float] = {}
        """Metrics of merging adapters into the last push, on every rank."""
        self._frozen: list[str] | None = None
        """Digests of the frozen weights of each rank, since the first push."""
        self._pushed, self._digest = WeightDigest(), ""

    def push(self, engines: Sequence[Engine], version: int, contract: NumericsContract) -> str:
        """Push as `Trainer.push` does, under the current contract of trainer and engines."""
        has_frozen = self._require_unchanged()
        merging = self._merging if contract.merges_adapter else None
        senders = self._senders(engines)
        ours = [e for e, rank in zip(engines, senders, strict=True) if rank == distributed.rank()]
        hold = partial(self._hold_the_last_push, ours, contract)
        carries = has_frozen and not all(distributed.run_on_all_ranks(hold))
        which: tuple[WeightPart, ...] = ("frozen", "trained") if carries else ("trained",)
        if merging is not None:
            which = ("trained", "frozen")  # adapters are gathered before what they are merged into
        known = self._pushed if has_frozen and not carries else WeightDigest()

        def push_ours() -> dict[str, str]:
            ranks = self._keepers | {*senders}
            with _gathered(self._source, self._max_bytes, *which, ranks=ranks) as parts:
                if merging is not None:
                    parts = {"trained": merging.buckets(parts)}
                outgoing = (self._outgoing(part, x, version, contract) for part, x in parts.items())
                sent = chain.from_iterable(outgoing)
                # A rank without engines still takes part in gathering, and discards the buckets.
                if ours:
                    digest = self._send(sent, ours, version, known)
                else:
                    deque(sent, maxlen=0)
            return {engine.url: digest for engine in ours}

        self._digest = _the_same(distributed.run_on_all_ranks(push_ours), engines)
        self.metrics = {}
        if merging is not None:
            self.metrics = next(filter(None, distributed.gather(merging.metrics(), None)), {})
        return self._digest

    def _senders(self, engines: Sequence[Engine]) -> list[int]:
        """Return the rank that sends to each engine."""
        near = distributed.gather([self.transport.is_near(engine) for engine in engines], None)
        return share_out(near, one_copy=self.transport.one_copy)

    def push_again(
        self, engines: Sequence[Engine], version: int, contract: NumericsContract
    ) -> str:
        """Push again as `Trainer.push_again` does; only rank 0 holds the kept weights."""
        if not self.config.plan.may_lag:
            return self.push(engines, version, contract)
        if distributed.rank() != 0:
            return ""
        device, frozen = str(distributed.device(contract.device)), self._kept["frozen"]
        kept = self._kept["trained"].buckets(version, device)
        if frozen.version is not None and not contract.merges_adapter:
            kept = chain(frozen.buckets(frozen.version, device), kept)
        return self._send(kept, engines, version, WeightDigest())

    def _send(
        self,
        buckets: Iterable[WeightBucket],
        engines: Sequence[Engine],
        version: int,
        known: WeightDigest,
    ) -> str:
        self._pushed = known
        self._digest = push_weights(buckets, engines, self.transport, version, known)
        return self._digest

    def _require_unchanged(self) -> bool:
        """Return whether any weights are frozen. Raises WeightSyncError if frozen weights have
        changed."""
        if self._frozen is not None and not any(self._frozen):
            return False
        found = distributed.gather(self._source.frozen_digest(), None)
        before, self._frozen = self._frozen or found, self._frozen or found
        if found != before:
            ranks = [rank for rank, digest in enumerate(found) if digest != before[rank]]
            raise WeightSyncError(
                f"ranks={ranks}: weights that are not trained have changed since the first push, so "
                "what samples and what learns are no longer one model. Resume with --load."
            )
        return any(found)

    def _hold_the_last_push(self, engines: Sequence[Engine], contract: NumericsContract) -> bool:
        """Return whether these engines prove that they hold the frozen weights
        (`sglang_patches/weights.py`): they are aligned, keep their memory, and hold this rank's last
        push."""
        if self.config.engine.colocate or not contract.is_aligned:
            return False
        if engines and self._pushed.hexdigest() != self._digest:
            return False
        return all(engine.report()["weights"] == self._digest for engine in engines)

    def _outgoing(
        self,
        part: WeightPart,
        buckets: Iterator[WeightBucket],
        version: int,
        contract: NumericsContract,
    ) -> Iterator[WeightBucket]:
        """Yield the buckets of a part as engines receive them; rank 0 keeps them for engines that
        restart."""
        sent = rounded(buckets, self._weight_format(contract))
        keeps = distributed.rank() in self._keepers
        return self._kept[part].keep(sent, version) if keeps else sent

    def export(self, directory: Path, dtype: str) -> None:
        """Export as `Trainer.export` does, in a dtype; of a model with adapters, only the adapters."""
        made_from, flags = self.config.model.hf_checkpoint, self.config.lora
        if self._adapter is not None:
            with _gathered(self._source, self._max_bytes, "trained", ranks={0}) as parts:
                if distributed.rank() == 0:
                    export_adapter(parts["trained"], directory, made_from, self._adapter, flags)
            return
        export(self._source, made_from, directory, dtype, self._max_bytes)

    def close(self) -> None:
        """End the transport's connections to engines."""
        self.transport.end()

    def _weight_format(self, contract: NumericsContract) -> str:
        """Return the format to round pushed weights to; an aligned trainer's weights are rounded
        already."""
        asked = self.config.engine.rollout_weight_format
        return "" if contract.is_aligned else format_of_push(contract, asked)


def bucket_bytes(config: TrainConfig) -> int:
    """Return the largest size of a bucket, but for a single tensor that is larger."""
    return config.sync.update_weight_buffer_size * MIB


def export(
    source: WeightSource,
    made_from: str,
    directory: Path,
    dtype: str,
    max_bytes: int,
    *,
    has_values: bool = False,
) -> None:
    """Write a model as a Hugging Face checkpoint, with the other files of the checkpoint that it was
    made from; collective. `has_values`: it is a critic."""
    with _gathered(source, max_bytes, "all", ranks={0}, masters=True) as parts:
        if distributed.rank() == 0:
            origin = Path(made_from)
            export_checkpoint(parts["all"], directory, origin, dtype, has_values=has_values)


@contextmanager
def _gathered(
    source: WeightSource,
    max_bytes: int,
    *parts: WeightPart,
    ranks: Collection[int],
    masters: bool = False,
) -> Iterator[dict[WeightPart, Iterator[WeightBucket]]]:
    """Provide the buckets of each part, to be iterated in this order; at the end gather the buckets
    that were not, since the other ranks take part."""
    gathered = {part: source.weight_buckets(max_bytes, part, ranks, masters) for part in parts}
    try:
        yield gathered
    finally:
        for _ in chain(*gathered.values()):
            pass


def _the_same(proved: Sequence[dict[str, str]], engines: Sequence[Engine]) -> str:
    """Return the digest that the engines of all ranks proved. Raises WeightSyncError if digests differ,
    or unless exactly one rank sent to each engine."""
    sent = sorted(url for of_rank in proved for url in of_rank)
    digests = {digest for of_rank in proved for digest in of_rank.values()}
    if sent != sorted(engine.url for engine in engines) or len(digests) != 1:
        raise WeightSyncError(
            f"weights={sorted(digests)} were proved by engines={sent}: each engine gets one push, and "
            "all the same weights. The trainer's ranks do not agree; resume with --load."
        )
    return digests.pop()
