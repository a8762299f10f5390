"""Log-probabilities of given tokens, straight from hidden states, without a [T, V] tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.base import Operators
from onpolicy.ops.kept_tokens import KeptTokens


class Scores(NamedTuple):
    """What a model's forward pass says of the tokens that are asked for."""

    log_probs: Tensor
    """float32 [R]."""

    entropy: Tensor
    """float32 [R], in nats, of the distribution that each token is drawn from; its gradient is computed
    where a loss has it, and only there."""


@dataclass(frozen=True, slots=True)
class VocabParallel:
    """An output projection whose rows, one per token of the vocabulary, are shared by ranks.

    Rank r of P holds rows r * n to (r + 1) * n of the weight; the last rows may be padding.

    Logits of some tokens are gathered before anything is summed over the vocabulary, so every
    degree gives the bits of one rank.
    """

    size: int
    """V: rows that stand for tokens; at most P * n."""

    group: dist.ProcessGroup | None = None
    """The tensor-parallel group; None: this process holds all rows."""

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    def gather(self, logits: Tensor) -> Tensor:
        """This rank's columns [M, n] to those of the whole vocabulary [M, V]; no autograd."""
        if self.ranks > 1:
            parts = logits.new_empty(self.ranks * logits.shape[0], logits.shape[1])
            dist.all_gather_into_tensor(parts, logits.contiguous(), group=self.group)
            logits = torch.cat(parts.chunk(self.ranks), dim=1)
        return logits[:, : self.size].contiguous()

    def take(self, logits: Tensor, columns: int) -> Tensor:
        """This rank's `columns` of [M, V], zero where they are padding: the inverse of `gather`."""
        if self.group is None:
            return logits
        padding = columns * self.ranks - self.size
        out: Tensor = F.pad(logits, (0, padding)).split(columns, dim=1)[self.group.rank()]
        return out


def token_log_probs(
    operators: Operators,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    vocabulary: VocabParallel | None = None,
    finish: Callable[[Tensor], Tensor] = lambda logits: logits,
    kept: KeptTokens | None = None,
) -> Scores:
    """`log_softmax(float32(hidden @ weight.T + bias) / temperature)` at `targets`, and the entropy.

    hidden: [T, K]; weight: [V, K]; bias: [V] or None; targets: int64 [T]; temperature: float32 [T].
    The backward pass computes the logits again, chunk by chunk, so memory grows with T + V, not T x V.

    With a `vocabulary`, `weight` and `bias` are this rank's rows of it, and so are their gradients;
    the gradient of `hidden` is this rank's part of a sum over the ranks.

    `finish` maps every logit by itself, before anything else is done with it (`models/logits.py`).

    `kept`: the tokens that each target was drawn from, which both are then of. A target that should have
    been drawn from others (`KeptTokens.cut`) has NaN.
    """
    vocabulary = vocabulary or VocabParallel(weight.shape[0])
    scores: tuple[Tensor, Tensor] = _TokenLogProbs.apply(
        operators, hidden, weight, bias, targets, temperature, vocabulary, finish, kept
    )
    return Scores(*scores)


def _chunks(operators: Operators, hidden: Tensor, vocabulary: VocabParallel) -> list[slice]:
    rows = operators.rows_per_chunk(vocabulary.size)
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
        vocabulary: VocabParallel,
        finish: Callable[[Tensor], Tensor],
        kept: KeptTokens | None,
    ) -> tuple[Tensor, Tensor]:
        log_probs = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        entropy = torch.empty_like(log_probs)
        for rows in _chunks(operators, hidden, vocabulary):
            logits = vocabulary.gather(finish(operators.linear(hidden[rows], weight, bias)))
            differ = None
            if kept is not None:
                differ = kept.differ(operators, logits, temperature[rows, None], rows)
                logits = kept.cut_to(logits, rows)
            log_probs[rows], entropy[rows] = operators.gather_log_probs(
                logits, temperature[rows, None], targets[rows]
            )
            if differ is not None:
                log_probs[rows] = log_probs[rows].masked_fill(differ, torch.nan)
        ctx.operators, ctx.vocabulary = operators, vocabulary  # type: ignore[attr-defined]
        ctx.finish, ctx.kept = finish, kept  # type: ignore[attr-defined]
        ctx.save_for_backward(hidden, weight, bias, targets, temperature)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature = ctx.saved_tensors  # type: ignore[attr-defined]
        operators: Operators = ctx.operators  # type: ignore[attr-defined]
        vocabulary: VocabParallel = ctx.vocabulary  # type: ignore[attr-defined]
        grad = torch.zeros_like(temperature) if grad is None else grad
        grad_hidden = torch.empty_like(hidden)
        head = [t.detach().requires_grad_() for t in (weight, bias) if t is not None]
        grad_head = [torch.zeros_like(t, dtype=torch.float32) for t in head]
        for rows in _chunks(operators, hidden, vocabulary):
            part = hidden[rows].detach().requires_grad_()
            with torch.enable_grad():
                product = operators.linear(part, *head)
                mine = ctx.finish(product)  # type: ignore[attr-defined]
            logits = vocabulary.gather(mine.detach())
            if ctx.kept is not None:  # type: ignore[attr-defined]
                logits = ctx.kept.cut_to(logits, rows)  # type: ignore[attr-defined]
            grad_logits = operators.grad_logits(
                logits,
                temperature[rows, None],
                targets[rows],
                grad[rows],
                None if grad_entropy is None else grad_entropy[rows],
            )
            grad_logits = vocabulary.take(grad_logits, weight.shape[0])
            if mine is not product:
                (grad_logits,) = torch.autograd.grad(mine, product, grad_logits)
            grad_hidden[rows] = operators.linear_gradients(
                product, part, head, grad_logits, grad_head
            )
        grad_weight, *grad_bias = (total.to(weight.dtype) for total in grad_head)
        return (
            None,
            grad_hidden,
            grad_weight,
            grad_bias[0] if grad_bias else None,
            None,
            None,
            None,
            None,
            None,
        )
