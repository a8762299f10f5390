"""Scores of the requested tokens, computed from their hidden states."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from onpolicy.ops.draws import Draws
from onpolicy.ops.kept_tokens import KeptTokens
from onpolicy.ops.log_probs import Head, Scores, token_log_probs
from onpolicy.ops.reverse_kl import TeacherRows, reverse_kl
from onpolicy.ops.shared_rows import SharedRows


class HiddenScores(NamedTuple):
    """Scores, and the hidden states that they were computed from."""

    log_probs: Tensor
    entropy: Tensor
    drawn: Tensor

    hidden: Tensor
    """[R, H]: the head's input for each token, without gradient"""


class TaughtScores(NamedTuple):
    """Scores, and the divergence of each token's distribution from the teacher's."""

    log_probs: Tensor
    entropy: Tensor
    drawn: Tensor

    reverse_kl: Tensor
    """float32 [R], in nats, with gradient"""


class Asked(Protocol):
    """The requested tokens of a micro-batch, or of a rank's part of it; see `PackedTokens`."""

    @property
    def rows(self) -> Tensor: ...
    @property
    def shared_rows(self) -> SharedRows | None: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def temperature(self) -> Tensor: ...
    @property
    def kept(self) -> KeptTokens | None: ...
    @property
    def draws(self) -> Draws | None: ...
    @property
    def wants_hidden(self) -> bool: ...
    @property
    def teacher(self) -> TeacherRows | None: ...


def rows_asked(hidden: Tensor, asked: Asked) -> Tensor:
    """Return the head's input for each requested token, from the row before it: [T, H] -> [R, H]."""
    if asked.shared_rows is not None:
        return asked.shared_rows.take(hidden)
    return hidden[asked.rows]


def score_rows(hidden: Tensor, head: Head, asked: Asked) -> Scores | HiddenScores | TaughtScores:
    """Compute the requested scores of hidden states [R, H] under a head."""
    scores = token_log_probs(
        head.operators,
        hidden,
        head.weight,
        head.bias,
        asked.targets,
        asked.temperature,
        head.vocabulary,
        head.finish,
        asked.kept,
        head.adapter,
        asked.draws,
    )
    if asked.wants_hidden:
        return HiddenScores(*scores, hidden.detach())
    if asked.teacher is not None:
        return TaughtScores(*scores, reverse_kl(hidden, head, asked.teacher))
    return scores
