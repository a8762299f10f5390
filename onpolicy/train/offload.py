"""Memory of a trainer that leaves its GPU while servers sample there, and comes back bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(slots=True)
class _Away:
    """A storage without memory, and its bytes in host memory; None: nobody needs them again."""

    storage: torch.UntypedStorage
    num_bytes: int
    copy: Tensor | None


class Offload:
    """Takes the memory of tensors away and gives it back under the same tensors.

    It is the storages that are emptied, as FSDP2 does with gathered weights: views of one (an
    optimizer's shards, a DTensor's own part, a flat buffer) stay what they are. The host's copies are
    kept from one time to the next, in pages that a GPU reaches by itself. On a CPU the bytes move
    within the host's memory, by the same code.
    """

    def __init__(self) -> None:
        self._away: list[_Away] = []
        self._copies: dict[int, Tensor] = {}

    def take(self, tensors: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """Empty the storages of these tensors, and of those that are `dropped`: they come back as memory
        that holds anything. What is away already stays there."""
        taken = [_Away(x, x.nbytes(), self._copied(x)) for x in _storages(tensors)]
        taken += [_Away(x, x.nbytes(), None) for x in _storages(dropped)]
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies, and all that still computes on what goes
        for away in taken:
            away.storage.resize_(0)
        self._away += taken
        torch.cuda.empty_cache()  # does nothing where there is no GPU

    def bring_back(self) -> None:
        """Give everything its memory and its bytes again."""
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
    """Each once that has memory."""
    own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    found = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in own)}
    return [storage for storage in found.values() if storage.nbytes()]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
