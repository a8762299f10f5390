"""Named weights on their way from the trainer to an engine, and their digest.

Both ends of a push hash every tensor by xxh3 (64 bits, seeded), with the same bits as the library
`xxhash`. Copying a GPU's bytes to the host for that would take longer than the push; so a GPU
hashes them itself (`xxh3_kernels.py`), and the host only hashes the last kilobyte of each tensor.
The hash only adds and multiplies integers, so a GPU and a CPU agree on every digest, and a digest
does not show where it was computed.

Source: Yann Collet's xxHash 0.8, xxhash.h: XXH3_hashLong_64b_withSeed and the functions that it
calls. An input longer than 240 bytes is cut into blocks of 16 stripes of 64 bytes; the stripes of a
block are added up in any order, the blocks are chained.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

WeightBucket = list[tuple[str, torch.Tensor]]
"""A list of whole parameters: (Hugging Face name, tensor in the engine's dtype)."""

WeightPart = Literal["all", "trained", "frozen"]
"""Part of a model's weights: those that training may change (trained parameters and buffers), or
the others."""


class WeightDigest:
    """A digest of named tensors that does not depend on their order. Both ends of a push compute it
    over the tensors in the engine's dtype, each on its own device (`digest.py`), with the same
    result. xxh3 is no cryptographic hash: it guards against mistakes, not against an attacker, and
    is as fast as memory."""

    def __init__(self) -> None:
        self._hashes: dict[str, int] = {}
        self._on_device = DeviceHashes(self._hashes)

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
    return flat.is_cuda and len(flat) > BLOCK


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


BLOCK, STRIPE, LANES = 1024, 64, 8
MASK = (1 << 64) - 1

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME64_1 = 0x9E3779B185EBCA87
START = (
    0xC2B2AE3D, PRIME64_1, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip

HELD = 1 << 26
"""Bytes of block sums, a 16th of the tensors', that are held before their blocks are chained."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A tensor whose blocks are summed and not chained yet."""

    seed: int
    num_bytes: int
    sums: Tensor
    tail: Tensor


class DeviceHashes:
    """A writer of hashes of named tensors of more than BLOCK bytes, many at a time."""

    def __init__(self, hashes: dict[str, int]) -> None:
        self._hashes = hashes
        self._begun: dict[str, _Begun] = {}
        self._held = 0

    def add(self, name: str, data: Tensor, seed: int) -> None:
        """Begin to hash uint8 [bytes], which may change or be freed after this call (on its stream)."""
        from onpolicy.weights.xxh3_kernels import add_up_blocks

        data = data if data.data_ptr() % 8 == 0 else data.clone()
        blocks = data[: (len(data) - 1) // BLOCK * BLOCK].view(torch.int64)
        sums = add_up_blocks(blocks, _words(secret_of(seed)).to(data.device))
        tail = data[-(BLOCK + STRIPE) :].clone()
        self._begun[name] = _Begun(seed, len(data), sums, tail)
        self._held += sums.nbytes
        if self._held > HELD:
            self.finish()

    def forget(self, name: str) -> None:
        """Drop a tensor that was begun."""
        self._begun.pop(name, None)

    def finish(self) -> None:
        """Store the hashes of all tensors so far; waits for the device."""
        for device in {begun.sums.device for begun in self._begun.values()}:
            group = {n: begun for n, begun in self._begun.items() if begun.sums.device == device}
            self._hashes |= zip(group, _chained(list(group.values())), strict=True)
        self._begun, self._held = {}, 0


def _chained(group: list[_Begun]) -> list[int]:
    from onpolicy.weights.xxh3_kernels import chain_blocks

    secrets = torch.stack([_words(secret_of(begun.seed)) for begun in group])
    start = torch.from_numpy(np.array(START, np.uint64).view(np.int64))
    device = group[0].sums.device
    chained = chain_blocks([b.sums for b in group], secrets.to(device), start.to(device))
    states = chained.cpu().numpy().view(np.uint64)
    tails = torch.cat([begun.tail for begun in group]).cpu()
    parts = tails.split([len(begun.tail) for begun in group])
    return [
        _finished(state, part.numpy(), begun.num_bytes, secret_of(begun.seed))
        for begun, state, part in zip(group, states, parts, strict=True)
    ]


def secret_of(seed: int) -> bytes:
    """Compute XXH3_initCustomSecret."""
    words = struct.unpack("<24Q", SECRET)
    signs = (1, -1) * 12
    return struct.pack("<24Q", *((w + s * seed) & MASK for w, s in zip(words, signs, strict=True)))


def _words(secret: bytes) -> Tensor:
    """Return a secret as int64 [24]."""
    return torch.frombuffer(bytearray(secret), dtype=torch.int64)


def _finished(state: np.ndarray, tail: np.ndarray, num_bytes: int, secret: bytes) -> int:
    """Return the hash from the chained blocks [8] and the last bytes. The tail holds the bytes
    after the blocks, and the 64 bytes before them."""
    after = num_bytes - (num_bytes - 1) // BLOCK * BLOCK
    stripes = (after - 1) // STRIPE
    first = len(tail) - after
    whole = tail[first : first + stripes * STRIPE].tobytes()
    state = state + _stripe_sums(whole, np.frombuffer(secret, "<u8"))
    last_secret = np.frombuffer(secret[len(secret) - STRIPE - 7 : -7], "<u8")
    state = state + _stripe_sums(tail[-STRIPE:].tobytes(), last_secret)
    keys = struct.unpack("<8Q", secret[11 : 11 + STRIPE])
    mixed = [int(word) ^ key for word, key in zip(state, keys, strict=True)]
    total = num_bytes * PRIME64_1
    for left, right in zip(mixed[::2], mixed[1::2], strict=True):
        product = left * right
        total += (product ^ (product >> 64)) & MASK
    return _avalanche(total & MASK)


def _stripe_sums(data: bytes, keys: np.ndarray) -> np.ndarray:
    """Compute XXH3_accumulate over whole stripes, the i-th with `keys` from word i on: uint64 [8]."""
    words = np.frombuffer(data, "<u8").reshape(-1, LANES)
    places = np.arange(len(words))[:, None] + np.arange(LANES)
    keyed = words ^ keys[places]
    terms = (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32))
    total: np.ndarray = (terms + words[:, np.arange(LANES) ^ 1]).sum(0, dtype=np.uint64)
    return total


def _avalanche(value: int) -> int:
    value ^= value >> 37
    value = value * 0x165667919E3779F9 & MASK
    return value ^ (value >> 32)
