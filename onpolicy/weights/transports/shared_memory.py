"""Tensors on the same host: shared memory whose handles travel over HTTP."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing

from onpolicy.system import private_directory
from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.push import Engine, Transport, on_all, size_of


class SharedMemoryTransport(Transport):
    """SGLang's update_weights_from_tensor. Every rank of an engine opens the same memory."""

    def share(self, bucket: WeightBucket) -> WeightBucket:
        """The bucket in memory that other processes can open."""
        # Handles by name, not by file descriptor: the engine is no child of this process.
        torch.multiprocessing.set_sharing_strategy("file_system")
        _start_manager()
        return [(name, tensor.cpu().share_memory_()) for name, tensor in bucket]

    def send(self, bucket: WeightBucket, engines: Sequence[Engine], version: str) -> None:
        shared = self.share(bucket)

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
    """Handles for one process to open. Each counts as a reference, which that process gives back."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(shared)
    return base64.b64encode(buffer.getvalue()).decode()


@functools.cache
def _start_manager() -> None:
    """Start torch's manager of shared memory, and write down where its socket is.

    It outlives this process by two seconds, then removes its socket, and dies of it if that is gone
    (torch/lib/libshm/manager.cpp).
    """
    socket, *_ = torch.empty(1).untyped_storage()._share_filename_cpu_()
    private_directory.of_this_process().record_socket(Path(socket.decode()))
