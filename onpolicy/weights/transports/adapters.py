"""Adapters to stock engines that have SGLang's own: loaded under one name, in the place of the last.

Source: sglang/srt/managers/tokenizer_control_mixin.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from onpolicy.contract import SERVED_ADAPTER, AdapterShape
from onpolicy.errors import EngineError, WeightSyncError
from onpolicy.weights import flat
from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.push import Engine, on_all, size_of
from onpolicy.weights.transports.shared_memory import SharedMemoryTransport


class AdapterTransport(SharedMemoryTransport):
    """SGLang's unload_lora_adapter and load_lora_adapter_from_tensors, of tensors in shared memory."""

    in_session = False

    def __init__(self, shape: AdapterShape):
        """shape: of the adapters that are sent."""
        super().__init__()
        self._sent: WeightBucket = []
        self._config = {
            "peft_type": "LORA",
            "r": shape.rank,
            # SGLang reads no use_rslora: it multiplies by lora_alpha / r in any case.
            "lora_alpha": shape.scale * shape.rank,
            "target_modules": list(shape.targets),
        }

    def open(self, engines: Sequence[Engine]) -> None:
        if far := [engine.url for engine in engines if not self.is_near(engine)]:
            raise WeightSyncError(
                f"--rollout-lora=sglang: {', '.join(far)} are on other hosts than the trainer, and "
                "adapters alone travel in its host's memory. Use --rollout-lora merged."
            )
        super().open(engines)
        self._sent = []
        on_all(engines, _unload)

    def send(self, bucket: WeightBucket, engines: Sequence[Engine], version: int) -> None:
        self._sent += bucket

    def close(self, engines: Sequence[Engine], version: int) -> None:
        bucket, self._sent = flat.in_order(self._sent), []
        handles = self.handles(bucket)

        def load(engine: Engine) -> None:
            body = {
                "lora_name": SERVED_ADAPTER,
                "config_dict": self._config,
                "serialized_named_tensors": handles(engine),
                "load_format": flat.LOAD_FORMAT,
            }
            engine.post("/load_lora_adapter_from_tensors", body, size_of(bucket))
            told = {"new_version": str(version), "abort_all_requests": False}
            engine.post("/update_weight_version", told)

        on_all(engines, load)

    def abandon(self) -> None:
        super().abandon()
        self._sent = []


def _unload(engine: Engine) -> None:
    """An engine that has none says so; one that keeps them then refuses to load others of the name."""
    with contextlib.suppress(EngineError):
        engine.post("/unload_lora_adapter", {"lora_name": SERVED_ADAPTER})
