"""Weights on the same host: a bucket in shared memory, whose handle is sent over HTTP."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from onpolicy.system import private_directory
from onpolicy.weights import flat
from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.push import Engine, Transport, on_all, size_of


class SharedMemoryTransport(Transport):
    """SGLang's update_weights_from_tensor. Every rank of an engine opens the same memory."""

    one_copy = True

    def __init__(self) -> None:
        self._buffer = flat.Buffer(_make_shared)
        self._ranks: dict[str, int] = {}
        """Number of ranks of each engine by its URL, since the last failed push."""

    def open(self, engines: Sequence[Engine]) -> None:
        """Ask only new engines for their number of ranks, since the answer lists all settings."""
        for engine in engines:
            if engine.url not in self._ranks:
                self._ranks[engine.url] = int(engine.report()["tp_size"])

    def abandon(self) -> None:
        self._buffer.free()  # an engine may still read what it was sent
        self._ranks.clear()  # a restarted engine may have another number

    def end(self) -> None:
        self._buffer.free()

    def share(self, bucket: WeightBucket) -> Tensor:
        """Return the bytes of an ordered bucket, uint8 [bytes], where other processes can open them."""
        return self._buffer.fill(bucket)

    def handles(self, bucket: WeightBucket) -> Callable[[Engine], list[str]]:
        """Share an ordered bucket; return a function from an engine to handles for its ranks."""
        shared = {"flattened_tensor": self.share(bucket), "metadata": flat.table(bucket)}
        return lambda engine: [_handle(shared) for _ in range(self._ranks[engine.url])]

    def send(self, bucket: WeightBucket, engines: Sequence[Engine], version: int) -> None:
        bucket = flat.in_order(bucket)
        handles = self.handles(bucket)

        def update(engine: Engine) -> None:
            engine.post(
                "/update_weights_from_tensor",
                {
                    "serialized_named_tensors": handles(engine),
                    "load_format": flat.LOAD_FORMAT,
                    "flush_cache": False,
                    "weight_version": str(version),
                },
                size_of(bucket),
            )

        on_all(engines, update)


def _make_shared(num_bytes: int) -> Tensor:
    # Handles by name, not by file descriptor: the engine is no child of this process.
    torch.multiprocessing.set_sharing_strategy("file_system")
    _start_manager()
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(num_bytes))


def _handle(shared: dict[str, Any]) -> str:
    """Create a handle for one process to open; it counts as a reference that the process releases."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(shared)
    return base64.b64encode(buffer.getvalue()).decode()


@functools.cache
def _start_manager() -> None:
    """Start torch's manager of shared memory, and record the path of its socket.

    It outlives this process by two seconds, then removes its socket, and dies if that is gone
    (torch/lib/libshm/manager.cpp).
    """
    socket, *_ = torch.empty(1).untyped_storage()._share_filename_cpu_()
    private_directory.of_this_process().record_socket(Path(socket.decode()))
