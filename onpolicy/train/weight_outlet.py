"""Where a trainer's weights leave it: to the engines, or into a checkpoint for others.

The ranks gather them together, a bucket at a time, and rank 0 hands them on: no other process sees them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.models.export import export_checkpoint
from onpolicy.train import distributed
from onpolicy.train.base import Trainer
from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.kept import KeptWeights
from onpolicy.weights.push import Engine, push_weights
from onpolicy.weights.rounding import rounded
from onpolicy.weights.transports import make_transport

MIB = 1 << 20


class WeightOutlet(Trainer):
    """A trainer whose ranks can gather their weights; `contract` is the one that it is under."""

    contract: NumericsContract

    def __init__(self, config: TrainConfig):
        self.config = config
        directory = Path(config.output.run_dir)
        self.transport = make_transport(config.sync.weight_sync, directory)
        self._kept = KeptWeights(directory)

    @abstractmethod
    def weight_buckets(self, max_bytes: int) -> Iterator[WeightBucket]:
        """All parameters on rank 0, gathered `max_bytes` at a time, in a fixed order.

        Collective: every rank has to take all of them.
        """

    def push(self, engines: Sequence[Engine], version: str) -> str:
        with self._gathered() as buckets:
            if distributed.rank() != 0:
                return ""
            sent = rounded(buckets, self._weight_format)
            if self.config.may_lag:
                sent = self._kept.keep(sent, version)
            return push_weights(sent, engines, self.transport, version)

    def push_again(self, engines: Sequence[Engine], version: str) -> str:
        if not self.config.may_lag:
            return self.push(engines, version)
        if distributed.rank() != 0:
            return ""
        kept = self._kept.buckets(version, str(distributed.device(self.contract.device)))
        return push_weights(kept, engines, self.transport, version)

    @property
    def _weight_format(self) -> str:
        """How weights are rounded here; on GPUs SGLang itself makes them FP8."""
        asked = self.config.engine.rollout_weight_format
        by_sglang = self.contract.device == "cuda" and asked == "fp8_e4m3"
        return "" if by_sglang or self.contract.is_aligned else asked

    def export(self, directory: Path) -> None:
        with self._gathered() as buckets:
            if distributed.rank() == 0:
                source = Path(self.config.model.hf_checkpoint)
                export_checkpoint(buckets, directory, source, self.contract.dtype)

    @contextmanager
    def _gathered(self) -> Iterator[Iterator[WeightBucket]]:
        """The buckets; what nobody has taken is gathered in the end, since the other ranks take part."""
        buckets = self.weight_buckets(self.config.sync.update_weight_buffer_size * MIB)
        try:
            yield buckets
        finally:
            for _ in buckets:
                pass
