"""Hand-over of a trainer's weights: to the engines, or into an exported checkpoint.

The ranks gather them together, a bucket at a time. Each rank sends them to its own engines
(`weights/push.py`), which prove receipt by a digest; then all ranks compare the digests. Frozen weights
go only to engines that do not hold them yet. Engines without adapters get all weights, and the adapters
are merged into them for each push.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path

from transformers import PreTrainedModel

from onpolicy.config import TrainConfig
from onpolicy.config.groups import ModelConfig
from onpolicy.contract import AdapterShape, NumericsContract
from onpolicy.errors import WeightSyncError
from onpolicy.models.hf_config import load_config
from onpolicy.models.hf_export import export_checkpoint
from onpolicy.models.lora.merged import Merged, merge_push
from onpolicy.models.lora.peft_format import export_adapter
from onpolicy.models.weight_files import matched_model
from onpolicy.training import distributed
from onpolicy.training.base import TrainerMemory
from onpolicy.training.engine import ShardedModel
from onpolicy.weights.changes import LastPush
from onpolicy.weights.digest import WeightBucket, WeightDigest, WeightPart
from onpolicy.weights.push import Engine, as_it_is, push_weights, share_out
from onpolicy.weights.rounding import format_of_push, rounded
from onpolicy.weights.transports import make_transport, shares_gpus
from onpolicy.weights.transports.disk import KeptWeights

MIB = 1 << 20

logger = logging.getLogger(__name__)


class WeightOutlet:
    """Gathering and hand-over of the ranks' weights, under the `contract` of the moment; every method
    is collective."""

    def __init__(self, config: TrainConfig, contract: NumericsContract, source: ShardedModel):
        self.config, self.contract, self._source = config, contract, source
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
        self.push_metrics: dict[str, float] = {}
        """Metrics of the last push, on every rank."""
        self._frozen: list[str] | None = None
        """Digests of the frozen weights of each rank, since the first push."""
        self._pushed, self._digest = WeightDigest(), ""
        self._last = LastPush() if config.sync.sparse_weight_sync else None

    def push(self, engines: Sequence[Engine], version: int) -> str:
        """Push as `Trainer.push` does."""
        self._bring_back("weights")
        has_frozen = self._require_unchanged()
        merging = self._merging if self.contract.merges_adapter else None
        senders = self._senders(engines)
        ours = [e for e, rank in zip(engines, senders, strict=True) if rank == distributed.rank()]
        asks = has_frozen or self._last is not None
        is_known = asks and self._all_hold_the_last_push(ours)
        carries = has_frozen and not is_known
        to_send = self._to_send(version, is_known=is_known)
        which: tuple[WeightPart, ...] = ("frozen", "trained") if carries else ("trained",)
        if merging is not None:
            which = ("trained", "frozen")  # adapters are gathered before what they are merged into
        known = self._pushed if has_frozen and not carries else WeightDigest()
        ranks, proved = self._keepers | {*senders}, dict[str, str]()
        with (
            distributed.failing_together(),
            _gathered(self._source, self._max_bytes, *which, ranks=ranks) as parts,
        ):
            if merging is not None:
                parts = {"trained": merging.buckets(parts)}
            sent = chain.from_iterable(self._outgoing(*part, version) for part in parts.items())
            if ours:
                self._pushed = known
                self._digest = push_weights(sent, ours, self.transport, version, known, to_send)
                proved = {engine.url: self._digest for engine in ours}
            else:  # this rank still takes part in gathering, and discards the buckets
                deque(sent, maxlen=0)
        self._digest = _the_same(distributed.gather(proved, None), engines)
        self.push_metrics = {}
        found = {} if merging is None else merging.metrics()
        if self._last is not None:
            self._last.digest = self._digest
            found |= self._last.metrics()
        if merging is not None or self._last is not None:
            self.push_metrics = next(filter(None, distributed.gather(found, None)), {})
        return self._digest

    def _to_send(self, version: int, *, is_known: bool) -> Callable[[WeightBucket], WeightBucket]:
        """Begin a push; return what turns a bucket into what is sent of it. Engines that do not prove
        what they hold get all weights."""
        if self._last is None:
            return as_it_is
        self._last.begin(is_known=is_known)
        if not is_known:
            logger.info("version %s: an engine has not proved the last push; it gets all", version)
        return self._last.changes if self.contract.is_aligned else as_it_is

    def _bring_back(self, *kinds: TrainerMemory) -> None:
        """Bring back memory that was released; there is none without servers on the same GPUs."""

    def _senders(self, engines: Sequence[Engine]) -> list[int]:
        """Return the rank that sends to each engine."""
        near = distributed.gather([self.transport.is_near(engine) for engine in engines], None)
        return share_out(near, one_copy=self.transport.one_copy)

    def push_again(self, engines: Sequence[Engine], version: int) -> str:
        """Push again as `Trainer.push_again` does; only rank 0 holds the kept weights."""
        if not self.config.plan.may_lag:
            return self.push(engines, version)
        self._bring_back("weights")
        if distributed.rank() != 0:
            return ""
        device, frozen = str(distributed.device(self.contract.device)), self._kept["frozen"]
        kept = self._kept["trained"].buckets(version, device)
        if frozen.version is not None and not self.contract.merges_adapter:
            kept = chain(frozen.buckets(frozen.version, device), kept)
        self._pushed = WeightDigest()
        self._digest = push_weights(kept, engines, self.transport, version, self._pushed)
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

    def _all_hold_the_last_push(self, engines: Sequence[Engine]) -> bool:
        """Return whether these engines of every rank prove that they hold the last push, as does a
        rank's copy (`sglang_patches/pushed_weights.py`): they are aligned and keep their memory."""
        if self.config.engine.colocate or not self.contract.is_aligned:
            return False
        copied = self._digest if self._last is None else self._last.digest
        holds = not engines or self._pushed.hexdigest() == copied == self._digest
        with distributed.failing_together():
            holds = holds and all(e.report()["weights"] == self._digest for e in engines)
        return all(distributed.gather(holds, None))

    def _outgoing(
        self, part: WeightPart, buckets: Iterator[WeightBucket], version: int
    ) -> Iterator[WeightBucket]:
        """Yield the buckets of a part as engines receive them; rank 0 keeps them for engines that
        restart."""
        asked = self.config.engine.rollout_weight_format
        # An aligned trainer's weights are rounded already.
        rounding = "" if self.contract.is_aligned else format_of_push(self.contract, asked)
        sent = rounded(buckets, rounding)
        if part == "frozen" and self._last is not None:
            sent = self._last.leaving_out(sent)
        keeps = distributed.rank() in self._keepers
        return self._kept[part].keep(sent, version) if keeps else sent

    def export(self, directory: Path) -> None:
        """Export as `Trainer.export` does; of a model with adapters, only the adapters."""
        self._bring_back("weights")
        made_from, flags = self.config.model.hf_checkpoint, self.config.lora
        if self._adapter is None:
            export(self._source, made_from, directory, self.contract.dtype, self._max_bytes)
            return
        with _gathered(self._source, self._max_bytes, "trained", ranks={0}) as parts:
            if distributed.rank() == 0:
                export_adapter(parts["trained"], directory, made_from, self._adapter, flags)

    def close(self) -> None:
        """End the transport's connections to engines."""
        self.transport.end()


class MergedPush:
    """The weights of a push with merged adapters, and the rounding loss of the last push."""

    def __init__(self, config: ModelConfig, adapter: AdapterShape):
        self._config, self._scale = config, adapter.scale
        self._last = Merged()

    @cached_property
    def _model(self) -> PreTrainedModel:
        """Return the model without weights; it maps the tensors of a checkpoint to parameters."""
        path, trust = self._config.hf_checkpoint, self._config.trust_remote_code
        return matched_model(path, load_config(path, trust), trust)

    def buckets(self, parts: Mapping[WeightPart, Iterator[WeightBucket]]) -> Iterator[WeightBucket]:
        """Yield all weights from both parts; all trained weights are gathered first."""
        self._last = Merged()
        given = parts["trained"], parts["frozen"], self._model, self._scale
        return merge_push(*given, self._last)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last merge; empty where this rank sent nothing."""
        if not self._last.linears:
            return {}
        return {
            "lora/merged_changed": self._last.changed_share,
            "lora/merged_rounding": self._last.rounding,
        }


def bucket_bytes(config: TrainConfig) -> int:
    """Return the largest size of a bucket, but for a single tensor that is larger."""
    return config.sync.update_weight_buffer_size * MIB


def export(
    source: ShardedModel,
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
    source: ShardedModel,
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
