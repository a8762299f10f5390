"""What the portable operators multiply in an order that is known; see `onpolicy/ops/portable`."""

from __future__ import annotations

MAX_HEAD_DIM = 224
"""Numbers of a query, key or value: two of the blocks in which MKL sums under MKL_CBWR=COMPATIBLE."""
