"""Sampled tokens: an engine's answer to one request, and a sequence with all its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import compress, pairwise

import numpy as np
from numpy.typing import NDArray

from onpolicy.grammar import Grammar, GrammarSpan


class FinishReason(StrEnum):
    """The reason for which a response ended."""

    STOP = "stop"
    """A stop token was sampled, or the text of a stop string, as the last of the response."""

    LENGTH = "length"
    """The response reached the longest allowed length and is truncated."""

    ABORT = "abort"
    """The response is incomplete; another request continues it."""


UNPUSHED = -1
"""Version of weights that an engine loaded itself, not from a push."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Span:
    """Tokens of a response that were sampled under the weights of one push."""

    version: int
    start: int
    end: int


@dataclass(slots=True, kw_only=True, frozen=True)
class Completion:
    """An engine's answer to one request."""

    response_ids: list[int]
    """The response's R sampled tokens. Example: [5, 11, 1]"""

    rollout_log_probs: list[float]
    """Log-probability of each token when it was sampled, float32 values [R]. Example: [-0.25, ...]"""

    finish_reason: FinishReason

    weight_version: int
    """Push that the engine's weights came from at the last token; UNPUSHED if from none."""

    num_cached_tokens: int
    """Number of prompt tokens found in the prefix cache."""

    routed_experts: NDArray[np.int32] | None = None
    """Experts that computed each token of prompt and response but the last, int32 [T - 1, layers x k];
    None if they were not asked for, or differ from the experts that the response was sampled with."""

    kept_tokens: list[bytes] = field(default_factory=list)
    """The set that each token was drawn from, [R] (`ops/kept_tokens.py`); empty if all were drawn from
    the whole vocabulary."""

    entropy: list[float] = field(default_factory=list)
    """Entropy of the distribution that each token was drawn from, in nats, float32 values [R]; empty if
    the engine does not report it."""

    spans: tuple[Span, ...] = ()
    """Pushes that its tokens come from, in order and without gaps, as the engine reports them; empty if
    it does not. Example: (Span(version='2', start=0, end=8), Span(version='3', start=8, end=11))"""

    def until(self, count: int, reason: FinishReason) -> Completion:
        """Return its first `count` tokens, with this finish reason."""
        cut = len(self.response_ids) - count
        spans = (replace(s, end=min(s.end, count)) for s in self.spans if s.start < count)
        experts = self.routed_experts
        return replace(
            self,
            response_ids=self.response_ids[:count],
            rollout_log_probs=self.rollout_log_probs[:count],
            finish_reason=reason,
            routed_experts=None if experts is None else experts[: len(experts) - cut],
            kept_tokens=self.kept_tokens[:count],
            entropy=self.entropy[:count],
            spans=tuple(spans),
        )


Forks = tuple[tuple[str, int], ...]
"""The forks that led to a branch of an episode, as `Trajectory.forks` has them."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Trajectory:
    """One sequence of given and sampled tokens. T: its tokens; R: the sampled ones."""

    token_ids: list[int]
    """Tokens of the sequence, [T]. Example: [17, 4, 9, 5, 11, 1]"""

    sampled: list[bool]
    """Whether the policy sampled each token, [T]; the others were given to it."""

    rollout_log_probs: list[float] = field(default_factory=list)
    """Log-probability of each sampled token when it was sampled, float32 values [R]."""

    temperatures: list[float] = field(default_factory=list)
    """Sampling temperature of each sampled token, [R]."""

    spans: tuple[Span, ...] = ()
    """Pushes that the sampled tokens come from, counted from 0 to R, as in `Completion`."""

    routed_experts: NDArray[np.int32] | None = None
    """Experts of each token, int32 [T - 1, layers x k], as in `Completion`."""

    kept_tokens: list[bytes] = field(default_factory=list)
    """The set that each sampled token was drawn from, [R] or empty, as in `Completion`."""

    entropy: list[float] = field(default_factory=list)
    """Entropy of each sampled token, [R], as in `Completion`; empty if any is unknown."""

    grammars: tuple[GrammarSpan, ...] = ()
    """Spans of tokens that were sampled under grammars, in order; some may count as given since."""

    finish_reason: FinishReason = FinishReason.ABORT

    weight_version: int = UNPUSHED
    """Push that the last sampled token comes from."""

    num_cached_tokens: int = 0
    """Number of tokens that all its requests found in the prefix cache."""

    num_prefix_tokens: int = field(default=0, compare=False)
    """Number of tokens that its requests began with; not compared, since it depends on the rounds."""

    forks: Forks = ()
    """Forks that made it a branch of an episode, from the first branch on: (key of a fork, number of
    tokens at which it left the branch before). Example: (("0", 12), ("2", 40))"""

    @staticmethod
    def begin(prompt_ids: Sequence[int]) -> Trajectory:
        """Return a trajectory of a prompt alone."""
        return Trajectory(token_ids=[*prompt_ids], sampled=[False] * len(prompt_ids))

    def plus(
        self, answer: Completion, temperature: float, grammar: Grammar | None = None
    ) -> Trajectory:
        """Return it with an engine's answer after all tokens so far.

        A token keeps the experts of the answer that computed it first.
        """
        return replace(
            self,
            token_ids=self.token_ids + answer.response_ids,
            sampled=self.sampled + [True] * len(answer.response_ids),
            rollout_log_probs=self.rollout_log_probs + answer.rollout_log_probs,
            temperatures=self.temperatures + [temperature] * len(answer.response_ids),
            spans=_joined(self.spans, answer.spans, self.num_sampled),
            routed_experts=self._experts_with(answer.routed_experts),
            kept_tokens=self._kept_with(answer),
            entropy=self._entropy_with(answer),
            grammars=self._grammars(answer, grammar),
            finish_reason=answer.finish_reason,
            weight_version=answer.weight_version,
            num_cached_tokens=self.num_cached_tokens + answer.num_cached_tokens,
            num_prefix_tokens=self.num_prefix_tokens + len(self.token_ids),
        )

    def given(self, token_ids: Sequence[int]) -> Trajectory:
        """Return it with further given tokens."""
        return replace(
            self,
            token_ids=self.token_ids + [*token_ids],
            sampled=self.sampled + [False] * len(token_ids),
        )

    def until(self, length: int) -> Trajectory:
        """Return its first `length` tokens."""
        count = sum(self.sampled[:length])
        spans = tuple(replace(s, end=min(s.end, count)) for s in self.spans if s.start < count)
        experts = self.routed_experts
        return replace(
            self,
            token_ids=self.token_ids[:length],
            sampled=self.sampled[:length],
            rollout_log_probs=self.rollout_log_probs[:count],
            temperatures=self.temperatures[:count],
            spans=spans,
            routed_experts=None if experts is None else experts[: length - 1],
            kept_tokens=self.kept_tokens[:count],
            entropy=self.entropy[:count],
            grammars=tuple(
                replace(g, end=min(g.end, length)) for g in self.grammars if g.start < length
            ),
            weight_version=spans[-1].version if spans else self.weight_version,
        )

    def forked(self, length: int, key: str) -> Trajectory:
        """Return a new branch that shares its first `length` tokens."""
        anew = replace(self.until(length), num_cached_tokens=0, num_prefix_tokens=0)
        return replace(anew, forks=(*self.forks, (key, length)))

    def as_given(self, length: int) -> Trajectory:
        """Return the same tokens, of which the first `length` count as given."""
        count = sum(self.sampled[:length])
        if not count:
            return self
        return replace(
            self,
            sampled=[False] * length + self.sampled[length:],
            rollout_log_probs=self.rollout_log_probs[count:],
            temperatures=self.temperatures[count:],
            kept_tokens=self.kept_tokens[count:],
            entropy=self.entropy[count:],
            spans=tuple(
                replace(s, start=max(s.start - count, 0), end=s.end - count)
                for s in self.spans
                if s.end > count
            ),
        )

    def _experts_with(self, more: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
        known = self.routed_experts
        if self.num_sampled == 0:
            return more
        if known is None or more is None:
            return None
        return np.concatenate([known, more[len(known) :]])

    def _kept_with(self, answer: Completion) -> list[bytes]:
        if not (self.kept_tokens or answer.kept_tokens):
            return []
        before = self.kept_tokens or [b""] * self.num_sampled
        return before + (answer.kept_tokens or [b""] * len(answer.response_ids))

    def _entropy_with(self, answer: Completion) -> list[float]:
        is_known = len(self.entropy) == self.num_sampled
        is_told = len(answer.entropy) == len(answer.response_ids)
        return self.entropy + answer.entropy if is_known and is_told else []

    def _grammars(self, answer: Completion, grammar: Grammar | None) -> tuple[GrammarSpan, ...]:
        if grammar is None or not answer.response_ids:
            return self.grammars
        start, end = self.start_within(grammar), len(self.token_ids) + len(answer.response_ids)
        before = (span for span in self.grammars if span.start < start)
        return (*before, GrammarSpan(grammar=grammar, start=start, end=end))

    def start_within(self, grammar: Grammar | None) -> int:
        """Return the index at which the grammar of the next answer starts: the last span's start if the
        last tokens were sampled under the same grammar, and the next token's otherwise."""
        last, length = self.grammars[-1:], len(self.token_ids)
        goes_on = last and last[0].end == length and last[0].grammar == grammar
        return last[0].start if goes_on else length

    @property
    def stretches(self) -> list[tuple[Forks, int, int]]:
        """Return (branch, start, end) of the tokens that it has from each branch of its episode, in
        order. A branch and a position identify one token, which was sampled once."""
        ends = [*(length for _, length in self.forks), len(self.token_ids)]
        edges = [0, *(min(ends[i:]) for i in range(len(ends)))]
        found = [(self.forks[:i], *edge) for i, edge in enumerate(pairwise(edges))]
        return [(branch, start, end) for branch, start, end in found if end > start]

    @property
    def num_sampled(self) -> int:
        """Return R."""
        return len(self.rollout_log_probs)

    @property
    def response_ids(self) -> list[int]:
        """Return the sampled tokens, [R]."""
        return list(compress(self.token_ids, self.sampled))

    @property
    def prompt_ids(self) -> list[int]:
        """Return the tokens given before the first sampled token."""
        return self.token_ids[: self.sampled.index(True) if self.num_sampled else None]


def _joined(so_far: tuple[Span, ...], more: tuple[Span, ...], length: int) -> tuple[Span, ...]:
    shifted = [replace(s, start=s.start + length, end=s.end + length) for s in more]
    if so_far and shifted and so_far[-1].version == shifted[0].version:
        shifted[0] = replace(shifted[0], start=so_far[-1].start)
        so_far = so_far[:-1]
    return (*so_far, *shifted)
