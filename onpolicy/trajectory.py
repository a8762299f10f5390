"""Sampled tokens: an engine's answer to one request, and a sequence with all its answers."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray
from pydantic import model_validator

from onpolicy.images.placed import PlacedImage
from onpolicy.system.number_arrays import Doubles, Flags, Floats, Ints, Numbers
from onpolicy.system.records import Count, written_as


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

    version: Annotated[int, Ge(UNPUSHED)]
    start: Count
    end: Count


def _hold(record: Any, **kinds: type[Numbers[Any]]) -> None:
    """Have fields of a frozen record hold numbers, if they were given a list."""
    for name, kind in kinds.items():
        if type(given := getattr(record, name)) is not kind:
            object.__setattr__(record, name, kind(given))


def _no_text() -> str:
    raise ValueError("an engine's answer has tokens, and no text")


@dataclass(slots=True, kw_only=True, frozen=True)
class Completion:
    """An engine's answer to one request, or the policy's to one call of `Turns.sample`."""

    response_ids: Ints
    """The response's R sampled tokens. Example: [5, 11, 1]"""

    rollout_log_probs: Floats
    """Log-probability of each token when it was sampled, [R]. Example: [-0.25, ...]"""

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

    row_digests: list[int] = field(default_factory=list)
    """Digest of each token's row of log-probabilities, [R] or empty (`ops/row_digests.py`)."""

    likeliest: list[bytes] = field(default_factory=list)
    """The engine's likeliest tokens at each token, [R] or empty (`ops/likeliest_tokens.py`)."""

    spans: tuple[Span, ...] = ()
    """Pushes that its tokens come from, in order and without gaps, as the engine reports them; empty if
    it does not. Example: (Span(version='2', start=0, end=8), Span(version='3', start=8, end=11))"""

    read: Callable[[], str] = field(default=_no_text, repr=False, compare=False)
    """Function that returns its text: special tokens included, without the stop token that ended it."""

    def __post_init__(self) -> None:
        _hold(self, response_ids=Ints, rollout_log_probs=Floats)

    @property
    def text(self) -> str:
        return self.read()

    @property
    def token_ids(self) -> list[int]:
        return self.response_ids.tolist()

    @property
    def log_probs(self) -> list[float]:
        return self.rollout_log_probs.tolist()

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
            row_digests=self.row_digests[:count],
            likeliest=self.likeliest[:count],
            spans=tuple(spans),
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class Grammar:
    """A grammar that an answer must follow as text."""

    kind: Literal["regex", "json_schema", "structural_tag"]

    text: str
    """A regular expression that matches the whole answer, a JSON schema, or a structural tag in JSON,
    which places texts and schemas in the answer
    (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html)."""

    stop_token_ids: tuple[Count, ...]
    """Tokens that end an answer once it is complete, and never earlier; at least one."""


@dataclass(slots=True, kw_only=True, frozen=True)
class GrammarSpan:
    """Tokens of a trajectory that were sampled under a grammar, from the grammar's start on."""

    grammar: Grammar
    start: Count
    """Index of the first such token among all tokens of the trajectory."""
    end: Count


Forks = tuple[tuple[str, Count], ...]
"""The forks that led to a branch of an episode, as `Trajectory.forks` has them."""


def _write_experts(experts: NDArray[np.int32]) -> tuple[int, int, str]:
    """Return the rows, the columns and all numbers in base64."""
    rows, columns = experts.shape
    return rows, columns, base64.b64encode(experts.tobytes()).decode()


def _read_experts(written: tuple[int, int, str], _: Any) -> NDArray[np.int32]:
    numbers = np.frombuffer(base64.b64decode(written[2], validate=True), dtype="<i4")
    return numbers.reshape(written[:2])


def _write_kept(kept: Sequence[bytes]) -> list[str | int]:
    """Return each set in base64 where it comes first, and afterwards its index among those."""
    known: dict[bytes, int] = {}
    written: list[str | int] = []
    for each in kept:
        written.append(known[each] if each in known else base64.b64encode(each).decode())
        known.setdefault(each, len(known))
    return written


def _read_kept(written: Sequence[str | int], _: Any) -> list[bytes]:
    """Return the sets of kept tokens; equal ones are held once."""
    known, kept = list[bytes](), list[bytes]()
    for each in written:
        if isinstance(each, str):
            known.append(base64.b64decode(each, validate=True))
        elif each >= len(known):
            raise ValueError(f"kept_tokens={each}: {len(known)} sets come before it")
        kept.append(known[-1] if isinstance(each, str) else known[each])
    return kept


RoutedExperts = Annotated[
    NDArray[np.int32], written_as(tuple[Count, Count, str], _write_experts, _read_experts)
]
KeptSets = Annotated[list[bytes], written_as(list[str | Count], _write_kept, _read_kept)]


def _written_as(kind: type[Numbers[Any]], number: Any) -> Any:
    """Return the annotation of numbers that are written as a list. Values that the kind does not
    hold to the bit are refused."""

    def read(written: list[Any], _: Any) -> Numbers[Any]:
        with np.errstate(over="ignore"):
            found = kind(written)
        if found.array.astype("<f8").tobytes() != np.array(written, "<f8").tobytes():
            raise ValueError(f"{written!s:.60}: must be numbers of {np.dtype(kind.dtype)}")
        return found

    return written_as(list[number], kind.tolist, read)


Token = Annotated[int, Ge(0), Le(np.iinfo(Ints.dtype).max)]


@dataclass(slots=True, kw_only=True, frozen=True)
class Trajectory:
    """One sequence of given and sampled tokens. T: its tokens; R: the sampled ones."""

    token_ids: Annotated[Ints, _written_as(Ints, Token)]
    """Tokens of the sequence, [T]. Example: [17, 4, 9, 5, 11, 1]"""

    sampled: Annotated[Flags, _written_as(Flags, bool)]
    """Whether the policy sampled each token, [T]; the others were given to it."""

    rollout_log_probs: Annotated[Floats, _written_as(Floats, float)] = field(default_factory=Floats)
    """Log-probability of each sampled token when it was sampled, [R]."""

    temperatures: Annotated[Doubles, _written_as(Doubles, Annotated[float, Gt(0)])] = field(
        default_factory=Doubles
    )
    """Sampling temperature of each sampled token, [R]."""

    spans: tuple[Span, ...] = ()
    """Pushes that the sampled tokens come from, counted from 0 to R, as in `Completion`."""

    routed_experts: RoutedExperts | None = None
    """Experts of each token, int32 [T - 1, layers x k], as in `Completion`."""

    kept_tokens: KeptSets = field(default_factory=list)
    """The set that each sampled token was drawn from, [R] or empty, as in `Completion`."""

    row_digests: list[int] = field(default_factory=list)
    """Digest of each sampled token's row, [R] or empty, as in `Completion`; 0 where none was given."""

    likeliest: KeptSets = field(default_factory=list)
    """The engine's likeliest tokens at each sampled token, [R] or empty, as in `Completion`."""

    grammars: tuple[GrammarSpan, ...] = ()
    """Spans of tokens that were sampled under grammars, in order; some may count as given since."""

    images: tuple[PlacedImage, ...] = ()
    """Images among its tokens, in order."""

    finish_reason: FinishReason = FinishReason.ABORT

    weight_version: Annotated[int, Ge(UNPUSHED)] = UNPUSHED
    """Push that the last sampled token comes from."""

    num_cached_tokens: Count = 0
    """Number of tokens that all its requests found in the prefix cache."""

    num_prefix_tokens: Count = field(default=0, compare=False)
    """Number of tokens that its requests began with; not compared, since it depends on interruptions."""

    forks: Forks = ()
    """Forks that made it a branch of an episode, from the first branch on: (key of a fork, number of
    tokens at which it left the branch before). Example: (("0", 12), ("2", 40))"""

    answers: tuple[tuple[Count, FinishReason], ...] = field(default=(), compare=False)
    """Where each complete answer on its own branch ends, and why, in order; not compared, since it
    depends on the calls that asked for the tokens."""

    times: tuple[tuple[Count, float, float], ...] = field(default=(), compare=False)
    """Where answers end, those of earlier branches too, and when each was asked for and complete, in
    seconds since the attempt began. It is empty where nobody measured it, and not compared."""

    def __post_init__(self) -> None:
        _hold(self, token_ids=Ints, sampled=Flags, rollout_log_probs=Floats, temperatures=Doubles)

    @model_validator(mode="after")
    def _require_possible(self) -> Trajectory:
        """Raise ValueError for a record of tokens that nobody can have sampled."""
        length, count = len(self.token_ids), self._num_sampled(None)
        if len(self.sampled) != length or self.sampled[:1] == [True]:
            raise ValueError(f"sampled={self.sampled!s:.60}: must be {length}, the first given")
        optional = ("kept_tokens", "row_digests", "likeliest")
        for name in ("rollout_log_probs", "temperatures", *optional):
            found = len(getattr(self, name))
            if found != count and (found or name not in optional):
                raise ValueError(f"sampled tokens are {count} and {name} {found}: a token has one")
        for span in self.spans:
            if not span.start <= span.end <= count:
                raise ValueError(f"spans={span}: must end after it starts, by {count}")
        edges = [(span.start, span.end) for span in self.grammars]
        if not all(0 < start < end <= length for start, end in edges):
            raise ValueError(f"grammars={edges}: each must start after 0 and end by {length}")
        places = [edge for image in self.images for edge in (image.start, image.end)]
        if sorted({*places}) != places or (places and places[-1] > length):
            raise ValueError(f"images={places}: must be places in their order, by {length}")
        ends = [end for end, _ in self.answers]
        if sorted({*ends}) != ends or (ends and ends[-1] > length):
            raise ValueError(f"answers={ends}: must be ends of answers in their order")
        if any(end > length for end, *_ in self.times):
            raise ValueError(f"times={self.times!s:.60}: must be of answers that end by {length}")
        return self

    @staticmethod
    def begin(prompt_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> Trajectory:
        """Return a trajectory of a prompt alone."""
        return Trajectory(
            token_ids=Ints(prompt_ids),
            sampled=Flags(np.zeros(len(prompt_ids), bool)),
            images=tuple(images),
        )

    def plus(
        self, answer: Completion, temperature: float, grammar: Grammar | None = None
    ) -> Trajectory:
        """Return it with an engine's answer after all tokens so far. A token keeps the experts of
        the answer that computed it first."""
        grammars, length, count = self.grammars, len(self.token_ids), len(answer.response_ids)
        if grammar and count:
            start, end = length - self.num_begun(grammar), length + count
            span = GrammarSpan(grammar=grammar, start=start, end=end)
            grammars = (*(g for g in grammars if g.start < start), span)
        return replace(
            self,
            token_ids=self.token_ids + answer.response_ids,
            sampled=self.sampled + np.ones(count, bool),
            rollout_log_probs=self.rollout_log_probs + answer.rollout_log_probs,
            temperatures=self.temperatures + np.full(count, temperature),
            spans=_joined(self.spans, answer.spans, self.num_sampled),
            routed_experts=self._experts_with(answer.routed_experts),
            kept_tokens=self._with(answer, "kept_tokens", b""),
            row_digests=self._with(answer, "row_digests", 0),
            likeliest=self._with(answer, "likeliest", b""),
            grammars=grammars,
            finish_reason=answer.finish_reason,
            weight_version=answer.weight_version,
            num_cached_tokens=self.num_cached_tokens + answer.num_cached_tokens,
            num_prefix_tokens=self.num_prefix_tokens + len(self.token_ids),
        )

    def answered(self, times: tuple[float, float] | None = None) -> Trajectory:
        """Return it with its last answer as a complete one, which took these `times`."""
        end = len(self.token_ids)
        measured = ((end, *times),) if times else ()
        answers = (*self.answers, (end, self.finish_reason))
        return replace(self, answers=answers, times=self.times + measured)

    def given(self, token_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> Trajectory:
        """Return it with further given tokens, and the images among them."""
        return replace(
            self,
            token_ids=self.token_ids + token_ids,
            sampled=self.sampled + np.zeros(len(token_ids), bool),
            images=(*self.images, *images),
        )

    def until(self, length: int) -> Trajectory:
        """Return its first `length` tokens."""
        count = self._num_sampled(length)
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
            row_digests=self.row_digests[:count],
            likeliest=self.likeliest[:count],
            grammars=tuple(
                replace(g, end=min(g.end, length)) for g in self.grammars if g.start < length
            ),
            images=tuple(image for image in self.images if image.end <= length),
            weight_version=spans[-1].version if spans else self.weight_version,
            answers=tuple(each for each in self.answers if each[0] <= length),
            times=tuple(each for each in self.times if each[0] <= length),
        )

    def forked(self, length: int, key: str) -> Trajectory:
        """Return a new branch that shares its first `length` tokens."""
        forks = (*self.forks, (key, length))
        return replace(
            self.until(length), num_cached_tokens=0, num_prefix_tokens=0, forks=forks, answers=()
        )

    def as_given(self, length: int) -> Trajectory:
        """Return the same tokens, of which the first `length` count as given."""
        count = self._num_sampled(length)
        if not count:
            return self
        return replace(
            self,
            sampled=Flags(np.zeros(length, bool)) + self.sampled[length:],
            rollout_log_probs=self.rollout_log_probs[count:],
            temperatures=self.temperatures[count:],
            kept_tokens=self.kept_tokens[count:],
            row_digests=self.row_digests[count:],
            likeliest=self.likeliest[count:],
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

    def _with(self, answer: Completion, name: str, none: Any) -> list[Any]:
        """Return the values of each sampled token under that name, with `none` where there is none."""
        before, more = getattr(self, name), getattr(answer, name)
        if not (before or more):
            return []
        before = before or [none] * self.num_sampled
        whole: list[Any] = before + (more or [none] * len(answer.response_ids))
        return whole

    def num_begun(self, grammar: Grammar | None) -> int:
        """Return the number of last tokens with which an answer within a grammar begins: those that
        were sampled under the same one."""
        last, length = self.grammar_at(len(self.token_ids) - 1), len(self.token_ids)
        return length - last.start if last and last.grammar == grammar else 0

    def grammar_at(self, place: int) -> GrammarSpan | None:
        """Return the span of the grammar that the token at `place` was sampled under, if any."""
        return next((g for g in self.grammars if g.start <= place < g.end), None)

    @property
    def key(self) -> tuple[str, ...]:
        """Return the keys of the forks that lead to its branch; empty for the first."""
        return tuple(key for key, _ in self.forks)

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

    def _num_sampled(self, length: int | None) -> int:
        """Return the number of sampled tokens among the first `length`; None: all."""
        return int(np.count_nonzero(self.sampled.array[:length]))

    @property
    def response_ids(self) -> Ints:
        """Return the sampled tokens, [R]."""
        return Ints(self.token_ids.array[self.sampled.array])

    @property
    def prompt_ids(self) -> list[int]:
        """Return the tokens given before the first sampled token."""
        first = self.sampled.index(True) if self.num_sampled else None
        return self.token_ids[:first].tolist()


def _joined(so_far: tuple[Span, ...], more: tuple[Span, ...], length: int) -> tuple[Span, ...]:
    shifted = [replace(s, start=s.start + length, end=s.end + length) for s in more]
    if so_far and shifted and so_far[-1].version == shifted[0].version:
        shifted[0] = replace(shifted[0], start=so_far[-1].start)
        so_far = so_far[:-1]
    return (*so_far, *shifted)
