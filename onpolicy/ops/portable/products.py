"""Matrix products on a CPU in an order of sums that is written down.

For every element a chain of fused multiply-adds, one for each k in its order,

    s = 0;  s = fma(x_k, w_k, s)  for the k of a block of 512;  blocks are added in their order,

as oneDNN's kernels for AVX2 compute it: every element has an accumulator of its own. oneDNN cuts
longer sums where caches may decide (those of 2,048 on an AMD EPYC, Zen 4), and has other kernels
for a single row or column and for matrices cut out of larger ones, so it gets none of these.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 512
"""Elements of K in a block; half of what oneDNN was seen to sum in one chain."""

MULTIPLE = 16
"""Rows and columns are padded with zeros to a multiple of it."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` of float32 [M, K], [N, K], [N] or None -> [M, N]."""
    blocks = zip(x.split(BLOCK, dim=1), weight.split(BLOCK, dim=1), strict=True)
    total = _chain(*next(blocks))
    for pair in blocks:
        total += _chain(*pair)
    return total if bias is None else total.add_(bias)


def _chain(x: Tensor, weight: Tensor) -> Tensor:
    rows, columns = len(x), len(weight)
    # oneDNN's product as TorchInductor calls it; F.linear takes MKL's in float32.
    out: Tensor = torch.ops.mkldnn._linear_pointwise(
        _padded(x), _padded(weight), None, "none", [], ""
    )
    return out[:rows, :columns]


def _padded(x: Tensor) -> Tensor:
    missing = -len(x) % MULTIPLE
    return F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
