"""Offloading of a trainer's GPU memory while servers sample there; it comes back bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(slots=True)
class _Away:
    """An emptied storage and its copy in host memory; None: its bytes are not needed again."""

    storage: torch.UntypedStorage
    num_bytes: int
    copy: Tensor | None


class Offload:
    """Memory of tensors that is released and restored under the same tensors.

    It empties storages, as FSDP2 does with gathered weights, so views of a storage (an optimizer's
    shards, a DTensor's local part, a flat buffer) stay valid. Host copies are kept from one time to the
    next, in pinned pages. On a CPU the bytes move within host memory, by the same code.
    """

    def __init__(self) -> None:
        self._away: list[_Away] = []
        self._copies: dict[int, Tensor] = {}

    def take(self, tensors: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """Empty the storages of these tensors, and of `dropped`, which come back with undefined
        contents. Storages that are already offloaded stay offloaded."""
        taken = [_Away(x, x.nbytes(), self._copied(x)) for x in _storages(tensors)]
        taken += [_Away(x, x.nbytes(), None) for x in _storages(dropped)]
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # for the copies, and kernels that still use these tensors
        for away in taken:
            away.storage.resize_(0)
        self._away += taken
        torch.cuda.empty_cache()  # does nothing where there is no GPU

    def bring_back(self) -> None:
        """Restore the memory and bytes of everything that was taken."""
        for away in self._away:
            away.storage.resize_(away.num_bytes)
            if away.copy is not None:
                _bytes(away.storage).copy_(away.copy)
        self._away = []

    def _copied(self, storage: torch.UntypedStorage) -> Tensor:
        data = _bytes(storage)
        copy = self._copies.get(storage._cdata)
        if copy is None or len(copy) != len(data):
            copy = torch.empty(len(data), dtype=torch.uint8, pin_memory=data.is_cuda)
            self._copies[storage._cdata] = copy
        return copy.copy_(data, non_blocking=True)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return each storage with memory once."""
    own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    found = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in own)}
    return [storage for storage in found.values() if storage.nbytes()]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
