"""Log-probabilities of given tokens, straight from hidden states, without a [T, V] tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.base import Operators
from onpolicy.ops.draws import Draws
from onpolicy.ops.kept_tokens import ONE, KeptTokens, counted, within
from onpolicy.ops.linears import Factors, add_low_rank
from onpolicy.ops.row_digests import NO_DIGEST


class Scores(NamedTuple):
    """The results of a model's forward pass for the requested tokens."""

    log_probs: Tensor
    """float32 [R]."""

    entropy: Tensor
    """float32 [R], in nats, of the distribution that each token is drawn from; its gradient is
    computed only if the loss depends on it."""

    drawn: Tensor
    """float32 [R]: the token that each token's seed draws; NaN where none was drawn."""

    row_digests: Tensor
    """int64 [R]: the digest of each row before any cut; NO_DIGEST where none was asked for."""


@dataclass(frozen=True, slots=True)
class VocabParallel:
    """An output projection whose rows, one per token of the vocabulary, are sharded over ranks.

    Rank r of P holds rows r * n to (r + 1) * n of the weight; the last rows may be padding.

    Logits of some tokens are gathered before any sum over the vocabulary, so every degree gives the
    bits of one rank.
    """

    size: int
    """Vocabulary size V, the number of rows that stand for tokens; at most P * n."""

    group: dist.ProcessGroup | None = None
    """The tensor-parallel group; None: this process holds all rows."""

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    def gather(self, logits: Tensor) -> Tensor:
        """Gather logits over ranks: this rank's columns [M, n] -> [M, V]; no autograd."""
        if self.ranks > 1:
            parts = logits.new_empty(self.ranks * logits.shape[0], logits.shape[1])
            dist.all_gather_into_tensor(parts, logits.contiguous(), group=self.group)
            logits = torch.cat(parts.chunk(self.ranks), dim=1)
        return logits[:, : self.size].contiguous()

    def take(self, logits: Tensor, columns: int) -> Tensor:
        """Return this rank's `columns` of [M, V], zero in the padding: the inverse of `gather`."""
        if self.group is None:
            return logits
        padding = columns * self.ranks - self.size
        out: Tensor = F.pad(logits, (0, padding)).split(columns, dim=1)[self.group.rank()]
        return out


@dataclass(frozen=True, slots=True)
class Head:
    """An output projection with everything between hidden states [T, K] and logits [T, V]."""

    operators: Operators

    weight: Tensor
    """[V, K], or this rank's rows of it"""

    bias: Tensor | None
    """[V], or this rank's rows of it"""

    vocabulary: VocabParallel
    finish: Callable[[Tensor], Tensor] = lambda logits: logits
    """Element-wise function of the logits, applied before anything else (`models/logits.py`)."""

    adapter: Factors | None = None
    """Adapter that is trained in the place of weight and bias, if any, and adds to the projection; b is
    [V, r], or this rank's rows"""

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return weight, bias, and an adapter's a and b, for which `gradients` are computed."""
        adapter = self.adapter
        of_adapter = (adapter.a, adapter.b) if adapter else (None, None)
        return self.weight, self.bias, *of_adapter

    def holding(self, tensors: Sequence[Tensor | None]) -> Head:
        """Return the same head with other `tensors`."""
        weight, bias, a, b = tensors
        assert weight is not None
        adapter = self.adapter
        if adapter is not None:
            assert a is not None and b is not None
            adapter = adapter._replace(a=a, b=b)
        return replace(self, weight=weight, bias=bias, adapter=adapter)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute [M, V] from hidden states [M, K]; no autograd."""
        return self.vocabulary.gather(self.finish(self._product(hidden)))

    def _product(self, hidden: Tensor) -> Tensor:
        product = self.operators.linear(hidden, self.weight, self.bias)
        if self.adapter is None:
            return product
        return add_low_rank(self.operators, hidden, product, self.adapter)

    def chunks(self, hidden: Tensor) -> list[slice]:
        """Return the slices of rows whose logits are held at a time."""
        rows = self.operators.rows_per_chunk(self.vocabulary.size)
        return [slice(r, r + rows) for r in range(0, hidden.shape[0], rows)]

    def gradients(
        self, hidden: Tensor, grad_logits: Callable[[Tensor, slice], Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states and of `tensors`, from the logits', chunk by chunk.

        grad_logits: (logits [M, V], their rows in `hidden`) -> their gradient [M, V], which is
        rounded to their dtype.
        """
        grad_hidden = torch.empty_like(hidden)
        held = [
            None if t is None else t.detach().requires_grad_(t.requires_grad) for t in self.tensors
        ]
        trained = {i: t for i, t in enumerate(held) if t is not None and t.requires_grad}
        sums = {i: torch.zeros_like(t, dtype=torch.float32) for i, t in trained.items()}
        head = self.holding(held)
        is_linear = self.adapter is None and self.weight.requires_grad
        # An adapter's gradients, or none at all, are left to autograd.
        gradients = (
            self.operators.linear_gradients if is_linear
            else partial(Operators.linear_gradients, self.operators)
        )  # fmt: skip
        # Recompute each chunk's logits, and add its gradients to float32 sums.
        for rows in self.chunks(hidden):
            part = hidden[rows].detach().requires_grad_()
            with torch.enable_grad():
                product = head._product(part)
                finished = self.finish(product)
            grad = grad_logits(self.vocabulary.gather(finished.detach()), rows).to(product.dtype)
            grad = self.vocabulary.take(grad, self.weight.shape[0])
            if finished is not product:
                (grad,) = torch.autograd.grad(finished, product, grad)
            wanted = [*trained.values()], grad, [*sums.values()]
            grad_hidden[rows] = gradients(product, part, *wanted)
        found = [sums[i].to(trained[i].dtype) if i in sums else None for i in range(len(held))]
        return grad_hidden, *found


def token_log_probs(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    kept: KeptTokens | None = None,
    draws: Draws | None = None,
) -> Scores:
    """Return the log-probabilities of `targets` from hidden states, and the entropy.

    The log-probabilities are `log_softmax(float32(hidden @ weight.T + bias) / temperature)` at
    `targets`, with the head's weight and bias.

    hidden: [T, K]; targets: int64 [T]; temperature: float32 [T].
    The backward pass recomputes the logits, chunk by chunk, so memory grows with T + V, not T x V.
    Tensors of the head that require no gradient get none. If it has only this rank's rows, so have
    their gradients, and the gradient of `hidden` is this rank's part of a sum over the ranks.

    `kept`: the sets that each target was drawn from, over which both are computed. A target whose
    set does not match (`KeptTokens.cut`) has NaN.

    `draws`: the targets' seeds; the chosen targets are drawn again, and their rows digested if asked.
    """
    scores: tuple[Tensor, ...] = _TokenLogProbs.apply(
        head, hidden, targets, temperature, kept, draws, *head.tensors
    )
    return Scores(*scores)


@torch.no_grad()
def square_sums(
    hidden: Tensor, head: Head, temperature: Tensor, kept: KeptTokens | None = None
) -> Tensor:
    """Return the sum of the squared probabilities of all tokens at each row, as `token_log_probs` has
    them: [R, K] -> float32 [R]; without gradient."""
    out = hidden.new_empty(len(hidden), dtype=torch.float32)
    for rows in head.chunks(hidden):
        logits = head.logits(hidden[rows])
        if kept is not None:
            logits = kept.cut_to(logits, rows)
        log_probs = head.operators.log_softmax(logits, temperature[rows, None])
        squares = head.operators.elementwise(torch.exp, 2 * log_probs.double())
        out[rows] = (counted(squares).sum(-1).double() / ONE).float()
    return out


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        head: Head,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor,
        kept: KeptTokens | None,
        draws: Draws | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        log_probs = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        entropy, drawn = torch.empty_like(log_probs), torch.full_like(log_probs, torch.nan)
        digests = torch.full_like(targets, NO_DIGEST)
        operators, head = head.operators, head.holding(tensors)
        for rows in head.chunks(hidden):
            logits = head.logits(hidden[rows])
            differ = mask = whole = None
            if kept is not None:
                whole = logits if draws is not None and draws.with_rows else None
                differ = kept.differ(operators, logits, temperature[rows, None], rows)
                mask = kept.mask(logits, rows)
                logits = within(logits, mask)
            log_probs[rows], entropy[rows] = operators.gather_log_probs(
                logits, temperature[rows, None], targets[rows]
            )
            if differ is not None:
                log_probs[rows] = log_probs[rows].masked_fill(differ, torch.nan)
            if draws is not None:
                drawn[rows], digests[rows] = draws.again(
                    operators, logits, temperature[rows, None], rows, mask, whole
                )
        ctx.head, ctx.kept = head, kept  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(drawn, digests)
        ctx.save_for_backward(hidden, targets, temperature, *tensors)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        return log_probs, entropy, drawn, digests

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad: Tensor | None, grad_entropy: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        hidden, targets, temperature, *tensors = ctx.saved_tensors  # type: ignore[attr-defined]
        head: Head = ctx.head.holding(tensors)  # type: ignore[attr-defined]
        kept: KeptTokens | None = ctx.kept  # type: ignore[attr-defined]
        grad = torch.zeros_like(temperature) if grad is None else grad

        def grad_logits(logits: Tensor, rows: slice) -> Tensor:
            if kept is not None:
                logits = kept.cut_to(logits, rows)
            of_entropy = None if grad_entropy is None else grad_entropy[rows]
            return head.operators.grad_logits(
                logits, temperature[rows, None], targets[rows], grad[rows], of_entropy
            )

        of_hidden, *of_tensors = head.gradients(hidden, grad_logits)
        return None, of_hidden, None, None, None, None, *of_tensors
