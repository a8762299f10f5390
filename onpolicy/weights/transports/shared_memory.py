"""Transports of weights to engines on the same host, by a handle of memory that is sent over HTTP.

A bucket lies in the host's shared memory, or in a GPU's own, which engines open by CUDA IPC: then
nothing is copied to the host, and nothing at all for an engine on the GPU that holds the bucket.
The pickles have the format of SGLang's MultiprocessingSerializer: torch replaces a tensor by a
handle of its memory, and SGLang's patch replaces a GPU's index by its UUID, since the index differs
in a process that sees other GPUs. No GPU has run this.

A bucket is one row of bytes with a table of its tensors, SGLang's load format "flattened_bucket":
tensors end to end, without gaps. An engine views the bytes in place, so each tensor must begin at a
multiple of its item size; so tensors with larger items come first.
Source: Engine.update_weights_from_tensor, sglang/srt/utils/patch_torch.py and
sglang/srt/weight_sync/tensor_bucket.py.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.multiprocessing
from torch import Tensor

from onpolicy.errors import WeightSyncError
from onpolicy.system import private_directory
from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.push import Engine, Transport, on_all, size_of

LOAD_FORMAT = "flattened_bucket"


class SharedMemoryTransport(Transport):
    """SGLang's update_weights_from_tensor. Every rank of an engine opens the same memory."""

    one_copy = True

    def __init__(self) -> None:
        self.memory: Memory = Buffer(_make_shared)
        self._ranks: dict[str, int] = {}
        """Number of ranks of each engine by its URL, since the last failed push."""

    def open(self, engines: Sequence[Engine]) -> None:
        """Ask only new engines for their number of ranks, since the answer lists all settings."""
        for engine in engines:
            if engine.url not in self._ranks:
                self._ranks[engine.url] = int(engine.report()["tp_size"])

    def abandon(self) -> None:
        self.memory.free()  # an engine may still read what it was sent
        self._ranks.clear()  # a restarted engine may have another number

    def end(self) -> None:
        self.memory.free()

    def send(self, bucket: WeightBucket, engines: Sequence[Engine], version: int) -> None:
        bucket = in_order(bucket)
        shared = {"flattened_tensor": self.memory.fill(bucket), "metadata": table(bucket)}

        def update(engine: Engine) -> None:
            handles = [_handle(shared) for _ in range(self._ranks[engine.url])]
            engine.post(
                "/update_weights_from_tensor",
                {
                    "serialized_named_tensors": handles,
                    "load_format": LOAD_FORMAT,
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
    """Start torch's manager of shared memory, and record the path of its socket. It outlives this
    process by two seconds, then removes its socket, and dies if that is gone
    (torch/lib/libshm/manager.cpp)."""
    socket, *_ = torch.empty(1).untyped_storage()._share_filename_cpu_()
    private_directory.of_this_process().record_socket(Path(socket.decode()))


class CudaIpcTransport(SharedMemoryTransport):
    """SGLang's update_weights_from_tensor, with memory of the trainer's own GPU."""

    one_copy = False  # an engine that opens its own GPU's memory copies nothing between GPUs

    def __init__(self) -> None:
        super().__init__()
        self.memory = DeviceMemory()

    def close(self, engines: Sequence[Engine], version: int) -> None:
        torch.cuda.ipc_collect()  # free memory that no engine holds open any more


class Memory(Protocol):
    """Memory that other processes can open."""

    def fill(self, bucket: WeightBucket) -> Tensor:
        """Return the bytes of an ordered bucket there: uint8 [bytes], valid until the next call."""

    def free(self) -> None:
        """Drop the memory; it lives on while others still read it."""


class Buffer:
    """Host memory that the buckets of all pushes reuse. Allocating new pages takes several times as
    long as copying a bucket into existing ones."""

    def __init__(self, make: Callable[[int], Tensor]):
        """Take the allocator `make`: (bytes) -> uint8 [bytes]."""
        self._make = make
        self._memory = torch.empty(0, dtype=torch.uint8)

    def fill(self, bucket: WeightBucket) -> Tensor:
        """Return the bytes of an ordered bucket: uint8 [bytes], valid until the next call."""
        num_bytes = sum(tensor.nbytes for _, tensor in bucket)
        if num_bytes > len(self._memory):
            self.free()
            self._memory = self._make(num_bytes)
        return flatten(bucket, out=self._memory[:num_bytes])

    def free(self) -> None:
        """Drop the memory; it lives on while others still read it."""
        self._memory = torch.empty(0, dtype=torch.uint8)


class DeviceMemory:
    """The trainer's own GPU memory (see `Memory`)."""

    def fill(self, bucket: WeightBucket) -> Tensor:
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        for name, tensor in bucket:
            if not tensor.is_cuda:
                raise WeightSyncError(
                    f"--weight-sync=ipc: the trainer holds {name} on {tensor.device}, and CUDA IPC "
                    "shares a GPU's memory. Choose --weight-sync tensor."
                )
        monkey_patch_torch_reductions()
        shared = flatten(bucket)
        torch.cuda.synchronize(shared.device)  # engines do not wait for our streams
        return shared

    def free(self) -> None:
        """Do nothing: a bucket is freed with its tensor."""


def in_order(bucket: WeightBucket) -> WeightBucket:
    """Return the bucket in the order of its layout."""
    return sorted(bucket, key=lambda named: -named[1].itemsize)


def as_bytes(bucket: WeightBucket) -> list[Tensor]:
    """Return the bytes of each tensor: uint8 [bytes], a view where it is contiguous."""
    return [tensor.detach().flatten().view(torch.uint8) for _, tensor in bucket]


def flatten(bucket: WeightBucket, out: Tensor | None = None) -> Tensor:
    """Return the bytes of an ordered bucket: uint8 [bytes], on its device, or in `out`."""
    parts = as_bytes(bucket)
    if out is None or out.device == parts[0].device:
        return torch.cat(parts, out=out)
    return out.copy_(torch.cat(parts))


def table(bucket: WeightBucket) -> list[SimpleNamespace]:
    """Return name, shape, dtype and place of each tensor of an ordered bucket. SGLang reads these
    fields, and unpickles this class too. Its own class would need an import of all of SGLang, which
    changes transformers in this process."""
    rows, start = [], 0
    for name, tensor in bucket:
        end = start + tensor.nbytes
        rows.append(
            SimpleNamespace(
                name=name,
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                start_idx=start,
                end_idx=end,
                numel=end - start,
            )
        )
        start = end
    return rows
