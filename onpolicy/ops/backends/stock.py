"""The entry of PyTorch's own kernels, which promise nothing; each engine keeps its own attention."""

from __future__ import annotations

from onpolicy.ops.backends.base import Backend
from onpolicy.ops.base import Operators


def _make(num_threads: int) -> Operators:
    from onpolicy.ops.stock import StockOperators

    return StockOperators(num_threads)


STOCK = Backend(name="stock", make=_make, needs_gpu=False)
