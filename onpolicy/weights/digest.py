"""Named weights on their way from the trainer to an engine, and their digest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file

from onpolicy.weights import xxh3

WeightBucket = list[tuple[str, torch.Tensor]]
"""A list of whole parameters: (Hugging Face name, tensor in the engine's dtype)."""

WeightPart = Literal["all", "trained", "frozen"]
"""Part of a model's weights: those that training may change (trained parameters and buffers), or
the others."""


def in_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int
) -> Iterator[WeightBucket]:
    """Yield named tensors in buckets of at most `max_bytes`, except for a single larger tensor."""
    bucket: WeightBucket = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def write_weights(bucket: WeightBucket, file: Path) -> None:
    """Write safetensors. Raise OSError where the library has its own error for a full disk."""
    file.touch()
    mode = file.stat().st_mode
    tensors = {name: tensor.contiguous().cpu() for name, tensor in bucket}
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
    file.chmod(mode)  # the library removes the permissions of others


class WeightDigest:
    """A digest of named tensors that does not depend on their order.

    Both ends of a push compute it over the tensors in the engine's dtype, each on its own device
    (`xxh3.py`), with the same result. xxh3 is no cryptographic hash: it guards against mistakes,
    not against an attacker, and is as fast as memory.
    """

    def __init__(self) -> None:
        self._hashes: dict[str, int] = {}
        self._on_device = xxh3.DeviceHashes(self._hashes)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add one tensor of any shape, dtype and device; a later one of the same name replaces it."""
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        label = xxhash.xxh3_64_intdigest(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        if hashes_itself(flat):
            self._on_device.add(name, flat, label)
        else:
            self._on_device.forget(name)
            self._hashes[name] = xxhash.xxh3_64_intdigest(flat.cpu().numpy().data, label)

    def hashes(self) -> dict[str, int]:
        """Return the hash of each tensor, by its name."""
        self._on_device.finish()
        return self._hashes

    def hexdigest(self) -> str:
        """Return 16 hex digits over all names, shapes, dtypes and bits."""
        lines = "\n".join(f"{name} {value:016x}" for name, value in sorted(self.hashes().items()))
        return xxhash.xxh3_64_hexdigest(lines.encode())


def hashes_itself(flat: torch.Tensor) -> bool:
    """Return whether the device that holds these bytes hashes them, rather than the host."""
    return flat.is_cuda and len(flat) > xxh3.BLOCK
