"""Log-probabilities of given tokens, straight from hidden states, without a [T, V] tensor."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.base import Operators

LOGITS_PER_CHUNK = 1 << 24
"""Logits alive at a time (64 MiB of float32); rows do not depend on where the chunks are cut."""


def token_log_probs(
    operators: Operators,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
) -> tuple[Tensor, Tensor]:
    """`log_softmax(float32(hidden @ weight.T + bias) / temperature)` at `targets`, and the entropy.

    hidden: [T, K]; weight: [V, K]; bias: [V] or None; targets: int64 [T]; temperature: float32 [T].
    Returns (log_probs float32 [T], entropy float32 [T] in nats, without gradient). The backward
    pass computes the logits again, chunk by chunk, so memory grows with T + V, not T x V.
    """
    return _TokenLogProbs.apply(operators, hidden, weight, bias, targets, temperature)


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    rows = max(16, LOGITS_PER_CHUNK // weight.shape[0])
    return [slice(r, r + rows) for r in range(0, hidden.shape[0], rows)]


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        operators: Operators,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
    ) -> tuple[Tensor, Tensor]:
        log_probs = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        entropy = torch.empty_like(log_probs)
        for rows in _chunks(hidden, weight):
            logits = operators.linear(hidden[rows], weight, bias)
            chunk = operators.log_softmax(logits, temperature[rows, None])
            log_probs[rows] = chunk.gather(1, targets[rows, None])[:, 0]
            entropy[rows] = -(chunk.exp() * chunk).sum(-1)
        ctx.operators = operators  # type: ignore[attr-defined]
        ctx.save_for_backward(hidden, weight, bias, targets, temperature)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature = ctx.saved_tensors  # type: ignore[attr-defined]
        operators: Operators = ctx.operators  # type: ignore[attr-defined]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for rows in _chunks(hidden, weight):
            logits = operators.linear(hidden[rows], weight, bias)
            scale = (grad[rows] / temperature[rows])[:, None]
            grad_logits = operators.log_softmax(logits, temperature[rows, None]).exp_().mul_(-scale)
            grad_logits.scatter_add_(1, targets[rows, None], scale)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = operators.linear(grad_logits, weight.t())
            grad_weight += operators.linear(grad_logits.t(), hidden[rows].t())
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return (
            None,
            grad_hidden,
            grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
        )
