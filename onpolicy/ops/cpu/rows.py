"""Functions of rows over the vocabulary on a CPU, a few rows at a time.

Such a function passes over its rows several times. A few rows stay in a core's cache meanwhile,
more so where a pass overwrites the previous one, and threads share the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from onpolicy.ops.cpu.layout import exponentiate_, whole_vectors
from onpolicy.ops.cpu.threads import PiecePool

NUMBERS = 1 << 17
"""Number of elements of a piece: 512 KiB of float32, unless a row has more."""

LogSoftmax = Callable[[Tensor, Tensor], Tensor]
"""The signature of `Operators.log_softmax`."""

WORK = 50.0
"""Approximate floating-point operations per element, which is divided, exponentiated and summed."""


def few_rows(size: int) -> int:
    """Return the number of rows of `size` elements in a piece."""
    return max(1, NUMBERS // size)


def few_rows_at_a_time(
    pool: PiecePool,
    fill: Callable[..., object],
    *tensors: Tensor,
) -> None:
    """Run `fill(*tensors)`, a function that fills rows from rows, in pieces of a few rows.

    The first tensor is [M, V]; no autograd.
    """
    count, size = tensors[0].shape
    step = few_rows(size)
    if count <= step:
        fill(*tensors)
        return

    def piece(rows: slice) -> None:
        fill(*(x[rows] for x in tensors))

    pieces = [partial(piece, slice(r, r + step)) for r in range(0, count, step)]
    pool.run(pieces, WORK * count * size)


def log_softmax(logits: Tensor, temperature: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute `Operators.log_softmax` of few contiguous rows, into `out`, float32, if given.

    It has no autograd.
    """
    wide = logits.float()
    if out is None and wide is not logits:
        out = wide
    scaled = torch.div(wide, temperature, out=out)
    return torch.log_softmax(scaled, dim=-1, out=scaled)


def fill_log_probs(
    log_softmax: LogSoftmax,
    logits: Tensor,
    temperature: Tensor,
    targets: Tensor,
    chosen: Tensor,
    entropy: Tensor,
) -> None:
    """Compute `Operators.gather_log_probs` of few contiguous rows, into float32 [M] and [M]."""
    log_probs = log_softmax(logits, temperature)
    chosen.copy_(log_probs.gather(1, targets[:, None])[:, 0])
    terms = whole_vectors(torch.exp, log_probs).mul_(log_probs)
    torch.neg(terms.sum(-1), out=entropy)


def fill_grad_logits(
    log_softmax: LogSoftmax,
    logits: Tensor,
    temperature: Tensor,
    targets: Tensor,
    grad: Tensor,
    out: Tensor,
) -> None:
    """Compute `Operators.grad_logits` of few contiguous rows, into [M, V] of any dtype."""
    scale = grad[:, None] / temperature
    result = exponentiate_(log_softmax(logits, temperature)).mul_(-scale)
    out.copy_(result.scatter_add_(1, targets[:, None], scale))


def fill_grad_logits_of_entropy(
    log_softmax: LogSoftmax,
    logits: Tensor,
    temperature: Tensor,
    targets: Tensor,
    grad: Tensor,
    grad_entropy: Tensor,
    out: Tensor,
) -> None:
    """Compute `fill_grad_logits` with a gradient of the entropy H too: dH/dlogit = -p (log p + H)."""
    scale = grad[:, None] / temperature
    log_probs = log_softmax(logits, temperature)
    probabilities = whole_vectors(torch.exp, log_probs)
    entropy = -(probabilities * log_probs).sum(-1, keepdim=True)
    slope = log_probs.add_(entropy).mul_(grad_entropy[:, None] / temperature)
    result = probabilities.mul_(slope.add_(scale).neg_())
    out.copy_(result.scatter_add_(1, targets[:, None], scale))
