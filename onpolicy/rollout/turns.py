"""Branch of an episode: the interface of its function to the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from onpolicy.config.kinds import SMALLEST_TEMPERATURE
from onpolicy.rollout.episode_rules import EpisodeRules
from onpolicy.rollout.failures import ContextExceededError, OtherTokensError
from onpolicy.rollout.grammars import grammar_of
from onpolicy.rollout.observations import Json, observation_key
from onpolicy.rollout.seeds import seed_of_branch
from onpolicy.trajectory import Completion, FinishReason, Trajectory
from onpolicy.types import BranchKey, Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The tokens sampled by one call of `Turns.sample`; R tokens."""

    token_ids: list[int]
    """[R], including the stop token, or the tokens of the stop string, that ended it."""

    log_probs: list[float]
    """float32 values [R]"""

    finish_reason: FinishReason
    """STOP, or LENGTH at the limit on sampled tokens: another `sample` may go on from there."""

    decode: Callable[[list[int]], str] = field(repr=False, compare=False)
    stop_token_ids: tuple[int, ...] = field(default=(), repr=False)

    @property
    def text(self) -> str:
        """The tokens as text, special ones included, without the stop token that ended them."""
        has_stopped = self.token_ids and self.token_ids[-1] in self.stop_token_ids
        return self.decode(self.token_ids[:-1] if has_stopped else self.token_ids)


@dataclass(slots=True, eq=False)
class Ask:
    """A call of `sample` that waits for the policy."""

    params: SamplingParams
    """The parameters of the call; `max_new_tokens` are the whole call's."""

    before: Trajectory
    answered: asyncio.Future[None]

    def wake(self, error: Exception | None = None) -> None:
        """Have the call return, or raise. Callable from any thread."""

        def tell() -> None:
            if self.answered.done():
                return
            if error is None:
                self.answered.set_result(None)
            else:
                self.answered.set_exception(error)

        self.answered.get_loop().call_soon_threadsafe(tell)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchRecord:
    """The state of one branch."""

    key: tuple[str, ...]
    trajectory: Trajectory
    answers: tuple[tuple[int, FinishReason], ...]
    """The end position of each complete answer, and why it ended."""


class UnderWay(Hashable, Protocol):
    """The interface of an episode to its branches and listeners (`OpenEpisode`)."""

    rules: EpisodeRules
    past: Mapping[BranchKey, BranchRecord]
    branches: Mapping[BranchKey, Turns]
    number: int
    index: int
    sampled_before: int

    @property
    def num_failures(self) -> int: ...

    @property
    def name(self) -> str: ...

    def asks(self, branch: Turns, ask: Ask) -> None: ...

    def withdraw(self, branch: Turns, ask: Ask) -> None: ...

    def branch(self, request: Request, shared: Trajectory, key: BranchKey) -> Turns: ...

    def request(self, branch: Turns, ask: Ask, most: int | None = None) -> Request: ...

    def add(self, branch: Turns, ask: Ask, answer: Completion) -> bool: ...

    def differs(self, message: str) -> OtherTokensError: ...


class Turns:
    """A branch of an episode: have the policy go on, and insert tokens.

    Only the episode's function uses it, in whichever event loop it runs.
    """

    def __init__(
        self, episode: UnderWay, request: Request, trajectory: Trajectory, key: tuple[str, ...]
    ):
        self.episode, self.key = episode, key
        self.request = request
        """The first request to the policy; its `max_new_tokens` counts all sampled tokens."""

        self.trajectory = trajectory
        """The tokens so far, and which of them were sampled."""

        self.begins_at = len(trajectory.token_ids)
        """The number of tokens shared with the branch it was forked from, or of the prompt."""

        self.past = episode.past.get(key)
        self.ask: Ask | None = None
        self.answers: list[tuple[int, FinishReason]] = []
        """The end position of every answer so far, and why it ended."""

        self._num_forks = self._num_observed = 0

    async def sample(
        self,
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        regex: str | None = None,
        json_schema: str | Mapping[str, Json] | None = None,
        structural_tag: str | None = None,
    ) -> Answer:
        """Have the policy go on, to a stop token, one of the texts `stop`, or the most tokens.

        regex, json_schema, structural_tag: the grammar that the whole answer must match
        (`Grammar`). An answer that ends with LENGTH goes on within it, if the next call asks for
        the same grammar.

        Raises ValueError where the policy has stopped and was given nothing since, or for a grammar
        that cannot be enforced, and ContextExceededError where no token fits any more.
        """
        grammar = grammar_of(regex, json_schema, self.request.params.stop_token_ids, structural_tag)
        if grammar is not None:
            self.episode.rules.require_grammar(grammar)
        params = replace(self._params(stop, max_tokens, temperature), grammar=grammar)
        before = self.trajectory
        if not params.max_new_tokens:
            return self._answer(before, FinishReason.LENGTH)
        ask = Ask(params, before, asyncio.get_running_loop().create_future())
        self.episode.asks(self, ask)
        try:
            await ask.answered
        except asyncio.CancelledError:
            self.episode.withdraw(self, ask)
            raise
        return self._answer(before, self.answers[-1][1])

    def _params(
        self, stop: Sequence[str], max_tokens: int | None, temperature: float | None
    ) -> SamplingParams:
        params, tokens = self.request.params, self.num_left
        self._require_quiet()
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(
                f"stop={stop!r}: must be texts, none of them empty. Give a list of them."
            )
        if temperature is not None and not temperature >= SMALLEST_TEMPERATURE:
            raise ValueError(
                f"temperature={temperature}: must be at least {SMALLEST_TEMPERATURE:g}: a greedy sample "
                "has no log-probabilities to learn from."
            )
        if max_tokens is not None:
            if max_tokens < 1:
                raise ValueError(
                    f"max_tokens={max_tokens}: must be at least 1. Leave it out for all."
                )
            tokens = min(tokens, max_tokens)
        if tokens:
            if self.has_stopped:
                raise ValueError(
                    "the policy has stopped: give it tokens before it is to sample more"
                )
            if self.room <= 0:
                raise ContextExceededError(self._exceeds(1))
        return replace(
            params,
            max_new_tokens=min(tokens, self.room),
            temperature=params.temperature if temperature is None else temperature,
            stop=tuple(stop),
        )

    def _answer(self, before: Trajectory, reason: FinishReason) -> Answer:
        return Answer(
            token_ids=self.trajectory.token_ids[len(before.token_ids) :],
            log_probs=self.trajectory.rollout_log_probs[before.num_sampled :],
            finish_reason=reason,
            decode=self.episode.rules.decode,
            stop_token_ids=self.request.params.stop_token_ids,
        )

    def append(self, more: str | Sequence[int] | Sequence[Mapping[str, Json]]) -> None:
        """Append text, tokens, or chat messages for the policy to read; they are not learnt.

        Raises ContextExceededError where they do not fit.
        """
        self._require_quiet()
        token_ids = self.episode.rules.tokens_of(more, self.trajectory)
        if len(token_ids) > self.room:
            raise ContextExceededError(self._exceeds(len(token_ids)))
        self.trajectory = self.trajectory.given(token_ids)

    def fork(self, length: int | None = None, *, key: str | None = None) -> Turns:
        """Return a branch with the first `length` tokens (default: all), which samples others after
        them.

        key: a part of its seed, besides this branch's seed; by default the index of the fork in
        this branch, so give one where the order of forks depends on the order of arrivals.
        """
        if length is None:
            self._require_quiet()
        known = self.trajectory if self.ask is None else self.ask.before
        length = len(known.token_ids) if length is None else length
        if not 0 <= length <= len(known.token_ids):
            raise ValueError(
                f"length={length}: a fork holds at most the "
                f"{len(known.token_ids)} that the branch has, answers that are complete."
            )
        key = str(self._num_forks) if key is None else key
        self._num_forks += 1
        seed = seed_of_branch(self.request.sampling_seed, ((key, length),))
        shared = known.forked(length, key)
        request = replace(self.request, sampling_seed=seed)
        return self.episode.branch(request, shared, (*self.key, key))

    async def observe(self, make: Callable[[], Awaitable[Json]]) -> Json:
        """Return the result of `make`, recorded before use: a resumed or repeated run gets the
        same.

        Use it for everything that is no function of the tokens: the time, a network, chance.
        """
        episode, count = self.episode, self._num_observed
        self._num_observed += 1
        tokens = self.trajectory.token_ids
        key = observation_key(episode.index, episode.num_failures, self.key, count, tokens)
        return await episode.rules.observations.observe(episode.number, key, make)

    @property
    def has_stopped(self) -> bool:
        """Whether a stop ended the last answer, and nothing was given since."""
        is_last = bool(self.answers) and self.answers[-1][0] == len(self.trajectory.token_ids)
        return is_last and self.answers[-1][1] == FinishReason.STOP

    @property
    def num_left(self) -> int:
        """The number of tokens that may still be sampled in this branch; shared tokens count as
        sampled."""
        return self.request.params.max_new_tokens - self.trajectory.num_sampled

    @property
    def room(self) -> int:
        """The number of tokens that still fit the context."""
        return self.episode.rules.max_context_len - len(self.trajectory.token_ids)

    def _require_quiet(self) -> None:
        if self.ask is not None:
            raise ValueError(
                "the policy is sampling on this branch: wait for it, or fork before it"
            )

    def _exceeds(self, more: int) -> str:
        have, most = len(self.trajectory.token_ids), self.episode.rules.max_context_len
        return f"{have} tokens and {more} more exceed --rollout-max-context-len={most}"


class Listener(Protocol):
    """A listener that samples for episodes. Called from any thread."""

    def asked(self, branch: Turns) -> None:
        """Sample for a branch that waits for the policy; `branch.ask` says how much."""

    def ended(self, episode: Any) -> None:
        """Note that the episode (`OpenEpisode`) is complete, or has failed."""
