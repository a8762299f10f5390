"""Where a trainer's weights leave it: to the engines, or into a checkpoint for others.

The ranks gather them together, a bucket at a time, and rank 0 hands them on: no other process sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.models.export import export_checkpoint
from onpolicy.train import distributed
from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.kept import KeptWeights
from onpolicy.weights.push import Engine, push_weights
from onpolicy.weights.rounding import rounded
from onpolicy.weights.transports import make_transport, shares_gpus

MIB = 1 << 20

WeightBuckets = Callable[[int], Iterator[WeightBucket]]
"""`ShardedModel.weight_buckets`."""


class WeightOutlet:
    """Gathers the weights of the ranks and hands them on; every method is collective."""

    def __init__(self, config: TrainConfig, contract: NumericsContract, weights: WeightBuckets):
        self.config, self._weights = config, weights
        directory = Path(config.output.run_dir)
        on_gpus = shares_gpus(config, contract.device)
        self.transport = make_transport(config.sync.weight_sync, directory, on_gpus=on_gpus)
        self._kept = KeptWeights(directory)

    def push(self, engines: Sequence[Engine], version: int, contract: NumericsContract) -> str:
        """`Trainer.push`, under the contract that the trainer and the engines are under."""
        with self._gathered() as buckets:
            if distributed.rank() != 0:
                return ""
            sent = rounded(buckets, self._weight_format(contract))
            if self.config.plan.may_lag:
                sent = self._kept.keep(sent, version)
            return push_weights(sent, engines, self.transport, version)

    def push_again(
        self, engines: Sequence[Engine], version: int, contract: NumericsContract
    ) -> str:
        """`Trainer.push_again`."""
        if not self.config.plan.may_lag:
            return self.push(engines, version, contract)
        if distributed.rank() != 0:
            return ""
        kept = self._kept.buckets(version, str(distributed.device(contract.device)))
        return push_weights(kept, engines, self.transport, version)

    def export(self, directory: Path, dtype: str) -> None:
        """`Trainer.export`, in a dtype."""
        with self._gathered() as buckets:
            if distributed.rank() == 0:
                source = Path(self.config.model.hf_checkpoint)
                export_checkpoint(buckets, directory, source, dtype)

    def close(self) -> None:
        """End what the transport keeps with engines."""
        self.transport.end()

    def _weight_format(self, contract: NumericsContract) -> str:
        """How weights are rounded here; on GPUs SGLang itself makes them FP8."""
        asked = self.config.engine.rollout_weight_format
        by_sglang = contract.device == "cuda" and asked == "fp8_e4m3"
        return "" if by_sglang or contract.is_aligned else asked

    @contextmanager
    def _gathered(self) -> Iterator[Iterator[WeightBucket]]:
        """The buckets; what nobody has taken is gathered in the end, since the other ranks take part."""
        buckets = self._weights(self.config.sync.update_weight_buffer_size * MIB)
        try:
            yield buckets
        finally:
            for _ in buckets:
                pass
