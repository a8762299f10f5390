"""Tensors on the same host: shared memory whose handles travel over HTTP."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing

from onpolicy.weight_sync.base import Engine, Transport, on_all, size_of
from onpolicy.weights import WeightBucket


class SharedMemoryTransport(Transport):
    """SGLang's update_weights_from_tensor. Every rank of an engine opens the same memory."""

    def send(self, bucket: WeightBucket, engines: Sequence[Engine], version: str) -> None:
        # Handles by name, not by file descriptor: the engine is no child of this process.
        torch.multiprocessing.set_sharing_strategy("file_system")
        shared = [(name, tensor.cpu().share_memory_()) for name, tensor in bucket]

        def update(engine: Engine) -> None:
            ranks = int(engine.report()["tp_size"])
            engine.post(
                "/update_weights_from_tensor",
                {
                    "serialized_named_tensors": [_handles(shared) for _ in range(ranks)],
                    "flush_cache": False,
                    "weight_version": version,
                },
                size_of(bucket),
            )

        on_all(engines, update)


def _handles(shared: WeightBucket) -> str:
    """For one process to open: each handle counts as a reference, which it gives back."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(shared)
    return base64.b64encode(buffer.getvalue()).decode()
