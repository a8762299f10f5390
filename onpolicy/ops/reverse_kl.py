"""The reverse KL from a model to a teacher, over the vocabulary, without a [R, V] tensor.

    KL(p || q) = sum over v of p(v) d(v),        d(v) = log p(v) - log q(v)
    its gradient by the logit of v              = p(v) (d(v) - KL(p || q))

The formula comes from generalised knowledge distillation (arXiv 2306.13649, section 3, on the
student's own samples). Where only the teacher's k likeliest tokens are known, all other tokens
count as one: their d(v) is the log ratio of their total probabilities. That is a KL too, and at
most the full one.

Where both have the same bits, every d(v) is exactly 0, and so are the KL and its gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.ops.base import Operators
from onpolicy.ops.kept_tokens import ONE, counted
from onpolicy.ops.log_probs import Head

_UNITS = 2.0**44
"""Integer that stands for one nat: integer sums do not depend on the order, and 2**19 nats fit."""


class TeacherRows(ABC):
    """A teacher's distributions at the R tokens of a micro-batch."""

    @abstractmethod
    def width(self, vocab_size: int) -> int:
        """Return the number of leading tokens that both vocabularies have.

        Checkpoints of one tokenizer pad their vocabularies to different sizes.
        """

    @abstractmethod
    def log_ratios(self, operators: Operators, log_probs: Tensor, rows: slice) -> Tensor:
        """Return d of every token from the model's log-probabilities of some rows, float32 [M, V]."""

    @abstractmethod
    def at(self, rows: Tensor) -> TeacherRows:
        """Return the given rows of it, int64 [N]."""


@dataclass(frozen=True, slots=True)
class WholeTeacher(TeacherRows):
    """A teacher by its hidden states, with the head that computes full distributions in chunks."""

    hidden: Tensor
    """[R, K], of the teacher's own dtype and size"""

    head: Head

    def width(self, vocab_size: int) -> int:
        return min(vocab_size, self.head.vocabulary.size)

    def log_ratios(self, operators: Operators, log_probs: Tensor, rows: slice) -> Tensor:
        logits = self.head.logits(self.hidden[rows])
        return log_probs - _log_softmax(operators, logits, log_probs.shape[1])

    def at(self, rows: Tensor) -> WholeTeacher:
        return WholeTeacher(self.hidden[rows], self.head)


@dataclass(frozen=True, slots=True)
class TopKTeacher(TeacherRows):
    """A teacher by its k likeliest tokens, with all other tokens as one."""

    tokens: Tensor
    """int64 [R, k]"""

    log_probs: Tensor
    """float32 [R, k]"""

    log_rest: Tensor
    """float32 [R]: log-probability of all other tokens together"""

    vocab_size: int

    @staticmethod
    def of(hidden: Tensor, head: Head, k: int, vocab_size: int) -> TopKTeacher:
        """Return the top k of a teacher's hidden states [R, K], for a model of this vocabulary size."""
        width = min(vocab_size, head.vocabulary.size)
        operators, found = head.operators, []
        for rows in head.chunks(hidden):
            log_probs = _log_softmax(operators, head.logits(hidden[rows]), width)
            top, tokens = log_probs.topk(k, dim=-1)
            found.append((tokens, top, _log_rest(operators, log_probs, tokens)))
        tokens, top, rest = map(torch.cat, zip(*found, strict=True))
        return TopKTeacher(tokens, top, rest, width)

    def width(self, vocab_size: int) -> int:
        return min(vocab_size, self.vocab_size)

    def log_ratios(self, operators: Operators, log_probs: Tensor, rows: slice) -> Tensor:
        tokens = self.tokens[rows]
        rest = _log_rest(operators, log_probs, tokens) - self.log_rest[rows]
        ratios = rest[:, None].expand_as(log_probs).contiguous()
        return ratios.scatter_(1, tokens, log_probs.gather(1, tokens) - self.log_probs[rows])

    def at(self, rows: Tensor) -> TopKTeacher:
        parts = (self.tokens[rows], self.log_probs[rows], self.log_rest[rows])
        return TopKTeacher(*parts, self.vocab_size)


@dataclass(frozen=True, slots=True)
class ToldTeacher(TeacherRows):
    """A teacher by its k likeliest tokens, without the probability of the others.

    The others have 1 minus the total of the k tokens, for the teacher's and for the model's numbers
    alike, so that equal numbers give equal rests.
    """

    tokens: Tensor
    """int64 [R, k]"""

    log_probs: Tensor
    """float32 [R, k]"""

    def width(self, vocab_size: int) -> int:
        return vocab_size

    def log_ratios(self, operators: Operators, log_probs: Tensor, rows: slice) -> Tensor:
        tokens, theirs = self.tokens[rows], self.log_probs[rows]
        ours = log_probs.gather(1, tokens)
        rest = _log_left(operators, ours) - _log_left(operators, theirs)
        ratios = rest[:, None].expand_as(log_probs).contiguous()
        return ratios.scatter_(1, tokens, ours - theirs)

    def at(self, rows: Tensor) -> ToldTeacher:
        return ToldTeacher(self.tokens[rows], self.log_probs[rows])


@dataclass(frozen=True, slots=True)
class RoutedTeacher(TeacherRows):
    """Several teachers, of which each covers some of the rows."""

    teachers: tuple[TeacherRows, ...]

    owner: Tensor
    """int64 [R]: the teacher of each row"""

    place: Tensor
    """int64 [R]: the row's place among its teacher's rows"""

    @staticmethod
    def of(said: Sequence[tuple[TeacherRows, Tensor]], count: int) -> RoutedTeacher:
        """Combine teachers, each with its rows, int64 [R'], of `count` rows in all."""
        owner = torch.zeros(count, dtype=torch.int64, device=said[0][1].device)
        place = torch.zeros_like(owner)
        for number, (_, rows) in enumerate(said):
            owner[rows] = number
            place[rows] = torch.arange(len(rows), device=rows.device)
        return RoutedTeacher(tuple(teacher for teacher, _ in said), owner, place)

    def width(self, vocab_size: int) -> int:
        return min(teacher.width(vocab_size) for teacher in self.teachers)

    def log_ratios(self, operators: Operators, log_probs: Tensor, rows: slice) -> Tensor:
        ratios = torch.empty_like(log_probs)
        for number, teacher in enumerate(self.teachers):
            mine = (self.owner[rows] == number).nonzero()[:, 0]
            if len(mine):
                part, every = teacher.at(self.place[rows][mine]), slice(None)
                ratios[mine] = part.log_ratios(operators, log_probs[mine], every)
        return ratios

    def at(self, rows: Tensor) -> RoutedTeacher:
        return RoutedTeacher(self.teachers, self.owner[rows], self.place[rows])


def _log_softmax(operators: Operators, logits: Tensor, width: int) -> Tensor:
    ones = torch.ones(len(logits), 1, device=logits.device)
    return operators.log_softmax(logits[:, :width].contiguous(), ones)


def _log_rest(operators: Operators, log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of all tokens but `tokens`, at least log(2**-52)."""
    counts = _counted(operators, log_probs).scatter_(1, tokens, 0)
    return _log_of(operators, counts.sum(-1))


def _log_left(operators: Operators, log_probs: Tensor) -> Tensor:
    """Return the log of 1 minus the total probability, at least log(2**-52): [M, k] -> [M]."""
    return _log_of(operators, int(ONE) - _counted(operators, log_probs).sum(-1))


def _counted(operators: Operators, log_probs: Tensor) -> Tensor:
    return counted(operators.elementwise(torch.exp, log_probs.double()))


def _log_of(operators: Operators, counts: Tensor) -> Tensor:
    return operators.elementwise(torch.log, counts.clamp_(min=1).double() / ONE).float()


def reverse_kl(hidden: Tensor, head: Head, teacher: TeacherRows) -> Tensor:
    """Compute the reverse KL to `teacher` at every row: hidden [R, K] -> float32 [R], in nats.

    Gradients flow to `hidden` and the head, as from `token_log_probs`; logits are computed a chunk
    of rows at a time, and again in the backward pass.
    """
    found: Tensor = _ReverseKl.apply(hidden, head, teacher, *head.tensors)
    return found


class _ReverseKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, head: Head, teacher: TeacherRows, *tensors: Tensor | None
    ) -> Tensor:
        operators, head = head.operators, head.holding(tensors)
        kl = hidden.new_empty(len(hidden), dtype=torch.float32)
        for rows in head.chunks(hidden):
            terms, ratios = _terms(operators, head.logits(hidden[rows]), teacher, rows)
            kl[rows] = _row_sums(terms.mul_(ratios))
        ctx.head, ctx.teacher = head, teacher  # type: ignore[attr-defined]
        ctx.save_for_backward(hidden, kl, *tensors)  # type: ignore[arg-type]
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, kl, *tensors = ctx.saved_tensors  # type: ignore[attr-defined]
        head: Head = ctx.head.holding(tensors)  # type: ignore[attr-defined]
        teacher: TeacherRows = ctx.teacher  # type: ignore[attr-defined]

        def grad_logits(logits: Tensor, rows: slice) -> Tensor:
            probabilities, ratios = _terms(head.operators, logits, teacher, rows)
            found = ratios.sub_(kl[rows, None]).mul_(probabilities).mul_(grad[rows, None])
            out = torch.zeros_like(logits)
            out[:, : found.shape[1]] = found
            return out

        of_hidden, *of_tensors = head.gradients(hidden, grad_logits)
        return of_hidden, None, None, *of_tensors


def _terms(
    operators: Operators, logits: Tensor, teacher: TeacherRows, rows: slice
) -> tuple[Tensor, Tensor]:
    """Return p and d of every token: float32 [M, V] each."""
    log_probs = _log_softmax(operators, logits, teacher.width(logits.shape[1]))
    ratios = teacher.log_ratios(operators, log_probs, rows)
    return operators.elementwise(torch.exp, log_probs), ratios


def _row_sums(terms: Tensor) -> Tensor:
    """Sum float32 [M, V] -> [M] independently of order; NaN where a term is not finite."""
    counts = (terms.double() * _UNITS).round().long().sum(-1)
    sums = (counts.double() / _UNITS).float()
    return sums.masked_fill(~terms.isfinite().all(-1), torch.nan)
