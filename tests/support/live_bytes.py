"""How many bytes tensors hold at a time, as operators make and free them."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts what operators return while it is entered; not what is there before, nor what an operator
    takes for itself."""

    def __init__(self):
        super().__init__()
        self.most = self._now = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(out):
            if storage._cdata not in given | self._known:
                self._add(storage._cdata, storage.nbytes())
                weakref.finalize(storage, self._remove, storage._cdata, storage.nbytes())
        return out

    def _add(self, key, num_bytes):
        self._known.add(key)
        self._now += num_bytes
        self.most = max(self.most, self._now)

    def _remove(self, key, num_bytes):
        self._known.discard(key)
        self._now -= num_bytes


def storages(values):
    return [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, Tensor)]
