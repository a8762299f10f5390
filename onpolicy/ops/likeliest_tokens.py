"""The k likeliest tokens that an engine returns with each sampled token, and a model's log-probabilities
of them without a [R, V] tensor.

They travel as bytes for each sampled token: k ids, little-endian int32, then their k log-probabilities,
float32, the likeliest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.kept_tokens import KeptTokens
from onpolicy.ops.log_probs import Head

_UNITS = 2.0**44
"""Integer that stands for a row's largest number: integer sums do not depend on the order."""


@dataclass(frozen=True, slots=True)
class LikeliestTokens:
    """The engine's k likeliest tokens at each of the R sampled tokens of a micro-batch."""

    tokens: Tensor
    """int64 [R, k]"""

    log_probs: Tensor
    """float32 [R, k], of the engine"""

    @staticmethod
    def of(rows: Sequence[bytes], device: torch.device | str = "cpu") -> LikeliestTokens:
        """Return what these bytes say. Raises ValueError if not as much for each sampled token."""
        if not rows or len({*map(len, rows)}) != 1 or not rows[0]:
            raise ValueError(
                f"likeliest={sorted({*map(len, rows)})} bytes: each token needs equally many"
            )
        ids, values = np.split(
            np.frombuffer(b"".join(rows), "<i4").reshape(len(rows), -1), 2, axis=1
        )
        return LikeliestTokens(
            torch.from_numpy(ids.astype(np.int64)).to(device),
            torch.from_numpy(values.copy().view("<f4")).to(device),
        )

    def at(self, rows: Tensor, missing: int = 0) -> LikeliestTokens:
        """Return those of int64 [M] sampled tokens, and of `missing` more, whatever they are."""
        return LikeliestTokens(
            *(F.pad(x[rows], (0, 0, 0, missing)) for x in (self.tokens, self.log_probs))
        )


def likeliest_log_probs(
    hidden: Tensor, head: Head, tokens: Tensor, temperature: Tensor, kept: KeptTokens | None = None
) -> Tensor:
    """Return a model's log-probabilities of these tokens, as of the sampled ones: float32 [R, k].

    hidden: [R, K]; tokens: int64 [R, k], different ones in a row; temperature: float32 [R]; kept: as
    for `token_log_probs`. Gradients flow to `hidden` and the head; logits are computed a chunk of rows
    at a time, and again in the backward pass.
    """
    found: Tensor = _LikeliestLogProbs.apply(hidden, head, tokens, temperature, kept, *head.tensors)
    return found


class _LikeliestLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        head: Head,
        tokens: Tensor,
        temperature: Tensor,
        kept: KeptTokens | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        head = head.holding(tensors)
        out = hidden.new_empty(tokens.shape, dtype=torch.float32)
        for rows in head.chunks(hidden):
            logits = head.logits(hidden[rows])
            if kept is not None:
                logits = kept.cut_to(logits, rows)
            log_probs = head.operators.log_softmax(logits, temperature[rows, None])
            out[rows] = log_probs.gather(1, tokens[rows])
        ctx.head, ctx.kept = head, kept  # type: ignore[attr-defined]
        ctx.save_for_backward(hidden, tokens, temperature, *tensors)  # type: ignore[arg-type]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, tokens, temperature, *tensors = ctx.saved_tensors  # type: ignore[attr-defined]
        head: Head = ctx.head.holding(tensors)  # type: ignore[attr-defined]
        kept: KeptTokens | None = ctx.kept  # type: ignore[attr-defined]
        totals = _row_sums(grad)

        def grad_logits(logits: Tensor, rows: slice) -> Tensor:
            if kept is not None:
                logits = kept.cut_to(logits, rows)
            operators, scale = head.operators, temperature[rows, None]
            log_probs = operators.log_softmax(logits, scale)
            found = operators.elementwise(torch.exp, log_probs).mul_(-totals[rows, None])
            found.scatter_add_(1, tokens[rows], grad[rows])
            return found.div_(scale).to(logits.dtype)

        of_hidden, *of_tensors = head.gradients(hidden, grad_logits)
        return of_hidden, None, None, None, None, *of_tensors


def _row_sums(x: Tensor) -> Tensor:
    """Sum float32 [M, k] -> [M] independently of order; NaN where a number is."""
    largest = x.abs().amax(-1, keepdim=True).double().clamp(min=torch.finfo(torch.float32).tiny)
    counted = (x.double() / largest * _UNITS).round().long().sum(-1)
    return (counted.double() / _UNITS * largest[:, 0]).float()
