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


@dataclass(frozen=True, slots=True)
class Head:
    """An output projection: what becomes of hidden states [T, K] until they are logits [T, V]."""

    operators: Operators

    weight: Tensor
    """[V, K], or this rank's rows of it"""

    bias: Tensor | None
    """[V], likewise"""

    vocabulary: VocabParallel
    finish: Callable[[Tensor], Tensor] = lambda logits: logits
    """Maps every logit by itself, before anything else is done with it (`models/logits.py`)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, V] of hidden states [M, K]; no autograd."""
        product = self.operators.linear(hidden, self.weight, self.bias)
        return self.vocabulary.gather(self.finish(product))

    def chunks(self, hidden: Tensor) -> list[slice]:
        """The rows whose logits are alive at a time."""
        rows = self.operators.rows_per_chunk(self.vocabulary.size)
        return [slice(r, r + rows) for r in range(0, hidden.shape[0], rows)]

    def gradients(
        self, hidden: Tensor, grad_logits: Callable[[Tensor, slice], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradients of hidden states, weight and bias, from that of the logits, chunk by chunk.

        grad_logits: (logits [M, V], which rows of `hidden` they are of) -> [M, V] in their dtype.
        """
        grad_hidden = torch.empty_like(hidden)
        head = [t.detach().requires_grad_() for t in (self.weight, self.bias) if t is not None]
        grad_head = [torch.zeros_like(t, dtype=torch.float32) for t in head]
        for rows in self.chunks(hidden):
            part = hidden[rows].detach().requires_grad_()
            with torch.enable_grad():
                product = self.operators.linear(part, *head)
                mine = self.finish(product)
            grad = grad_logits(self.vocabulary.gather(mine.detach()), rows)
            grad = self.vocabulary.take(grad, self.weight.shape[0])
            if mine is not product:
                (grad,) = torch.autograd.grad(mine, product, grad)
            grad_hidden[rows] = self.operators.linear_gradients(
                product, part, head, grad, grad_head
            )
        grad_weight, *grad_bias = (total.to(self.weight.dtype) for total in grad_head)
        return grad_hidden, grad_weight, grad_bias[0] if grad_bias else None


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
        head = Head(operators, weight, bias, vocabulary, finish)
        for rows in head.chunks(hidden):
            logits = head.logits(hidden[rows])
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
        kept: KeptTokens | None = ctx.kept  # type: ignore[attr-defined]
        grad = torch.zeros_like(temperature) if grad is None else grad

        def grad_logits(logits: Tensor, rows: slice) -> Tensor:
            if kept is not None:
                logits = kept.cut_to(logits, rows)
            of_entropy = None if grad_entropy is None else grad_entropy[rows]
            return operators.grad_logits(
                logits, temperature[rows, None], targets[rows], grad[rows], of_entropy
            )

        head = Head(operators, weight, bias, ctx.vocabulary, ctx.finish)  # type: ignore[attr-defined]
        grad_hidden, grad_weight, grad_bias = head.gradients(hidden, grad_logits)
        return (
            None,
            grad_hidden,
            grad_weight,
            grad_bias,
            None,
            None,
            None,
            None,
            None,
        )
