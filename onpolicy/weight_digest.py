"""A digest of a set of named tensors that does not depend on the order they come in.

Both ends of a weight push compute it over the tensors as the engine's dtype holds them. xxh3 is no
cryptographic hash: it guards against mistakes, not against an attacker, and keeps up with memory.
"""

from __future__ import annotations

import torch
import xxhash


class WeightDigest:
    """Collects named tensors; a name that is added again replaces the earlier one."""

    def __init__(self) -> None:
        self._hashes: dict[str, int] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add one tensor of any shape, dtype and device."""
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
        label = f"{name}|{tensor.dtype}|{tuple(tensor.shape)}"
        self._hashes[name] = xxhash.xxh3_64_intdigest(flat.numpy(), xxhash.xxh3_64_intdigest(label.encode()))

    def hexdigest(self) -> str:
        """16 hex digits over all names, shapes, dtypes and bits."""
        lines = "\n".join(f"{name} {value:016x}" for name, value in sorted(self._hashes.items()))
        return xxhash.xxh3_64_hexdigest(lines.encode())
