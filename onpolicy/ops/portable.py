"""The CPU's operators with the same bits on every x86-64 processor with AVX2.

They are the operators of `ops/cpu` on kernels that all such processors have (`PORTABLE_KERNELS`),
with matrix products whose order is written down, and tested at creation. PyTorch's own AVX2 kernels
are the same instructions everywhere, and so are MKL's exp, log, sin, cos and tanh. MKL's square
root is not: it refines an approximation that differs between AMD's and Intel's processors. No
operator uses it, nor does the optimizer (`OperatorsConfig.is_portable`).

An element of a product is a chain of fused multiply-adds, one for each k in order,

    s = 0;  s = fma(x_k, w_k, s)  for the k of a block of 512;  blocks are added in their order,

as oneDNN's kernels for AVX2 compute it: every element has an accumulator of its own. oneDNN cuts
longer sums where caches may decide (from 2,048 elements on an AMD EPYC, Zen 4), and has other
kernels for a single row or column and for matrices cut out of larger ones, so it gets none of
these.

Attention's products are MKL's, under MKL_CBWR=COMPATIBLE a chain of multiplications and additions,
each rounded: over a block of 64 keys or rows, or over blocks of 112 of the head dimension, each
added to the sum so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onpolicy.contract import PORTABLE_KERNELS
from onpolicy.errors import ContractError
from onpolicy.ops.backends.base import MAX_HEAD_DIM
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.cpu.gemms import Gemms
from onpolicy.ops.cpu.layout import pad_rows

COLUMNS = 256
"""Number of columns of a tile of a product."""

BLOCK = 512
"""Number of elements of K in a block; half of the longest sum that oneDNN was seen to chain."""

MULTIPLE = 16
"""Number to whose multiples rows and columns are padded with zeros."""

MKL_BLOCK = 112
"""Number of elements of K in a block of MKL's, up to MAX_HEAD_DIM; its cuts of longer sums are not
known."""

PRODUCTS = ((16, BLOCK, 256), (48, 2 * BLOCK + 33, 64), (256, 40, 256), (7, 100, 1))
"""Tested products: rows, K, columns."""

BATCHED = (
    (1, 16, 32, 64),
    (3, 64, 64, 40),
    (3, 32, 112, 64),
    (1, 16, 128, 64),
    (3, 64, 192, 64),
    (1, 16, MAX_HEAD_DIM, 64),
)
"""Tested batched products: batch, rows, K, columns."""


class PortableOperators(CpuOperators):
    """`CpuOperators` with products in an order of their own.

    Creating them stops PyTorch from choosing oneDNN by itself.
    """

    column_tile = COLUMNS

    def __init__(self, num_threads: int = 1):
        """Raise ContractError if this process's libraries multiply in another order."""
        super().__init__(num_threads)
        # PyTorch chooses oneDNN by the processor's instructions, not by those that are enabled.
        torch.backends.mkldnn.set_flags(False)
        self.gemms = Gemms(self.pool, product=product, columns=COLUMNS)
        require_order()


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x @ weight.T + bias` of float32 [M, K], [N, K], [N] or None -> [M, N]."""
    blocks = zip(x.split(BLOCK, dim=1), weight.split(BLOCK, dim=1), strict=True)
    total = _chain(*next(blocks))
    for pair in blocks:
        total += _chain(*pair)
    return total if bias is None else total.add_(bias)


def _chain(x: Tensor, weight: Tensor) -> Tensor:
    rows, columns = len(x), len(weight)
    # oneDNN's product as TorchInductor calls it; F.linear takes MKL's in float32.
    out: Tensor = torch.ops.mkldnn._linear_pointwise(
        pad_rows(x, MULTIPLE).contiguous(),
        pad_rows(weight, MULTIPLE).contiguous(),
        None,
        "none",
        [],
        "",
    )
    return out[:rows, :columns]


def require_order() -> None:
    """Raise ContractError if a product of this process differs in a bit from the written-out order."""
    for m, k, n in PRODUCTS:
        x, weight = _numbers(1, m, k, 1), _numbers(1, n, k, 2)
        want = written_out(x, weight.transpose(1, 2), BLOCK, fused=True)
        _require("oneDNN", (m, k, n), product(x[0], weight[0], None), want[0])
    for batch, m, k, n in BATCHED:
        a, b, out = _numbers(batch, m, k, 3), _numbers(batch, k, n, 4), _numbers(batch, m, n, 5)
        want = written_out(a, b, MKL_BLOCK, fused=False)
        for left in (a, _turned(a)):
            for right in (b, _turned(b)):
                _require("MKL", (m, k, n), torch.bmm(left, right), want)
        if k <= MKL_BLOCK:
            _require("MKL", (m, k, n), out.baddbmm(_turned(a), b), out + want)


def written_out(a: Tensor, b: Tensor, block: int, *, fused: bool) -> Tensor:
    """Compute float32 [B, M, K] @ [B, K, N] -> [B, M, N], summed as the module's docstring says.

    The numbers are integers small enough for float64 to hold every product and sum exactly, so the
    only rounding of a fused multiply-add is to float32.
    """
    total = None
    for first in range(0, a.shape[2], block):
        chain = a.new_zeros(a.shape[0], a.shape[1], b.shape[2])
        for k in range(first, min(first + block, a.shape[2])):
            term = a[:, :, k, None].double() * b[:, None, k].double()
            chain = (chain + (term if fused else term.float())).float()
        total = chain if total is None else total + chain
    assert total is not None
    return total


def _turned(x: Tensor) -> Tensor:
    """Return the same numbers in column-major order."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _numbers(*shape_and_seed: int) -> Tensor:
    """Return fixed integers of up to 15 bits; their 30-bit products do not fit a float32."""
    *shape, seed = shape_and_seed
    words = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).add_(seed * 7919)
    words.mul_(2654435761).remainder_(1 << 31).bitwise_right_shift_(16).sub_(1 << 14)
    return words.float().view(shape)


def _require(library: str, shape: tuple[int, int, int], got: Tensor, want: Tensor) -> None:
    if not torch.equal(got, want):
        settings = " ".join(f"{name}={value}" for name, value in PORTABLE_KERNELS.items())
        raise ContractError(
            f"product={'x'.join(map(str, shape))}: {int((got != want).sum())} of {want.numel()} sums of "
            f"{library} are not in the order of portable operators, so their bits may be others on "
            f"another processor. They need {settings} from the start of the process on, and torch as "
            "requirements/ pins it; or give --operators cpu."
        )
