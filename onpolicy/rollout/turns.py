"""Branch of an episode: the interface of its function to the policy.

The records that a branch works with stand after it, and the rules for all episodes of a run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from onpolicy.config.kinds import SMALLEST_TEMPERATURE
from onpolicy.images.placed import PlacedImage
from onpolicy.rollout.failures import ContextExceededError, OnFailure, OtherTokensError
from onpolicy.rollout.observations import Json, Observations, observation_key
from onpolicy.rollout.seeds import seed_of_branch
from onpolicy.trajectory import Completion, FinishReason, Grammar, Trajectory
from onpolicy.types import BranchKey, Request, SamplingParams


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

        self.past = episode.past.get(key)
        self.ask: Request | None = None
        """The request of the call of `sample` that waits for the policy, for all of its tokens."""

        self.before = trajectory
        """The tokens before the latest call of `sample`."""

        self.asked_at = 0.0
        """When that call began, in seconds since the attempt began."""

        self._answered: asyncio.Future[None] | None = None
        self._num_forks = self._num_observed = 0

    async def sample(
        self,
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        regex: str | None = None,
        json_schema: str | Mapping[str, Json] | None = None,
        grammar: Grammar | None = None,
    ) -> Completion:
        """Have the policy go on, to a stop token, one of the texts `stop`, or the most tokens.

        regex, json_schema, or a grammar that `Turns.grammar` returned: what the whole answer must
        match. An answer that ends with LENGTH goes on within it, if the next call asks for the same.

        Raises ValueError where the policy has stopped and was given nothing since, or for a grammar
        that cannot be enforced, and ContextExceededError where no token fits any more.
        """
        grammar = grammar or self.grammar(regex=regex, json_schema=json_schema)
        params = replace(self._params(stop, max_tokens, temperature), grammar=grammar)
        before = self.before = self.trajectory
        if not params.max_new_tokens:
            return self._answer(before, FinishReason.LENGTH)
        ask = replace(
            self.request, prompt_ids=before.token_ids, images=before.images, params=params
        )
        self._answered = asyncio.get_running_loop().create_future()
        self.episode.asks(self, ask)
        try:
            await self._answered
        except asyncio.CancelledError:
            self.episode.withdraw(self, ask)
            raise
        return self._answer(before, self.trajectory.answers[-1][1])

    def grammar(self, **given: Any) -> Grammar | None:
        """Return the grammar that `regex`, `json_schema` or `structural_tag` gives, if one does.

        Raises ValueError for two of them or one that cannot be enforced, and TypeError for no text.
        """
        asked: dict[Any, Any] = {kind: text for kind, text in given.items() if text is not None}
        if not asked:
            return None
        if len(asked) > 1:
            names = " and ".join(asked)
            raise ValueError(f"{names}: an answer is held to one of them. Leave one out.")
        ((kind, text),) = asked.items()
        if kind == "json_schema" and not isinstance(text, str):
            text = json.dumps(text)  # not sorted: properties come in the schema's order
        if not isinstance(text, str):
            raise TypeError(f"{kind}={text!r:.80}: must be a text")
        if not self.episode.rules.holds_grammars():
            raise ValueError(
                f"{kind}: needs --true-on-policy-mode, where engines say what a token was drawn from. "
                "Leave it out, or turn the mode on."
            )
        from onpolicy.models.token_grammars import require_grammar  # brings torch along

        stop_token_ids = tuple(sorted(self.request.params.stop_token_ids))
        require_grammar(kind, text, stop_token_ids)
        return Grammar(kind=kind, text=text, stop_token_ids=stop_token_ids)

    def wake(self, error: Exception | None = None) -> None:
        """Have the call of `sample` return, or raise. Callable from any thread."""
        answered = self._answered
        assert answered is not None

        def tell() -> None:
            if answered.done():
                return
            if error is None:
                answered.set_result(None)
            else:
                answered.set_exception(error)

        answered.get_loop().call_soon_threadsafe(tell)

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

    def _answer(self, before: Trajectory, reason: FinishReason) -> Completion:
        """Return the tokens since then as one answer; experts are the trajectory's alone."""
        own = self.trajectory.as_given(len(before.token_ids))
        ids = own.token_ids[len(before.token_ids) :]
        has_stopped = ids and ids[-1] in self.request.params.stop_token_ids
        shown = ids.tolist()[:-1] if has_stopped else ids.tolist()
        return Completion(
            response_ids=ids,
            rollout_log_probs=own.rollout_log_probs,
            finish_reason=reason,
            weight_version=own.weight_version,
            num_cached_tokens=own.num_cached_tokens - before.num_cached_tokens,
            kept_tokens=own.kept_tokens,
            row_digests=own.row_digests,
            likeliest=own.likeliest,
            spans=own.spans,
            read=lambda: self.episode.rules.decode(shown),
        )

    def append(self, more: str | Sequence[int] | Sequence[Mapping[str, Json]]) -> None:
        """Append text, tokens, or chat messages to be read, with images in OpenAI's form.

        Raises ContextExceededError, and ValueError for what cannot be read.
        """
        self._require_quiet()
        self.insert(*self.episode.rules.tokens_of(more, self.trajectory))

    def insert(self, token_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> None:
        """Append tokens, and the images at their places among them. Raises ContextExceededError."""
        self._require_quiet()
        if len(token_ids) > self.room:
            raise ContextExceededError(self._exceeds(len(token_ids)))
        self.trajectory = self.trajectory.given(token_ids, images)

    def fork(self, length: int | None = None, *, key: str | None = None) -> Turns:
        """Return a branch with the first `length` tokens (default: all), which samples others then.

        key: a part of its seed; by default the index of the fork in this branch, so give one where
        the order of forks depends on the order of arrivals.
        """
        if length is None:
            self._require_quiet()
        known = self.trajectory if self.ask is None else self.before
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
        """Return the result of `make`, recorded before use for a resumed or repeated run.

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
        stopped = len(self.trajectory.token_ids), FinishReason.STOP
        return self.trajectory.answers[-1:] == (stopped,)

    @property
    def num_left(self) -> int:
        """The number of tokens this branch may still sample; shared ones count as sampled."""
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


class UnderWay(Hashable, Protocol):
    """The interface of an episode to its branches and listeners (`OpenEpisode`)."""

    rules: EpisodeRules
    past: Mapping[BranchKey, Trajectory]
    branches: Mapping[BranchKey, Turns]
    number: int
    index: int

    @property
    def num_failures(self) -> int: ...

    @property
    def name(self) -> str: ...

    def asks(self, branch: Turns, ask: Request) -> None: ...

    def withdraw(self, branch: Turns, ask: Request) -> None: ...

    def branch(self, request: Request, shared: Trajectory, key: BranchKey) -> Turns: ...

    def request(self, branch: Turns, ask: Request, most: int | None = None) -> Request: ...

    def add(self, branch: Turns, ask: Request, answer: Completion) -> bool: ...

    def differs(self, message: str) -> OtherTokensError: ...

    async def wait_for(self, places: asyncio.Semaphore) -> None: ...


class Listener(Protocol):
    """A listener that samples for episodes. Called from any thread."""

    def asked(self, branch: Turns) -> None:
        """Sample for a branch that waits for the policy; `branch.ask` says how much."""

    def ended(self, episode: Any) -> None:
        """Note that the episode (`OpenEpisode`) is complete, or has failed."""


def _no_text(token_ids: Sequence[int]) -> str:
    raise ValueError("this episode has no tokenizer")


def _only_tokens(
    more: str | Sequence[int] | Sequence[Mapping[str, Json]], so_far: Trajectory
) -> tuple[list[int], Sequence[PlacedImage]]:
    if isinstance(more, str) or not all(isinstance(token, int) for token in more):
        raise ValueError("this episode has no tokenizer: give token ids")
    return [*more], ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """The rules for all episodes of a run."""

    max_context_len: int = sys.maxsize
    """The most tokens of a branch."""

    time_limit: float | None = None
    """The seconds that an episode may take, sampling excluded."""

    on_failure: OnFailure = "stop"

    is_repeated: bool = False
    """Whether a run is repeated: the attempts that failed in it fail, and no others."""

    observations: Observations = field(default_factory=Observations)
    decode: Callable[[list[int]], str] = _no_text
    tokens_of: Callable[..., tuple[list[int], Sequence[PlacedImage]]] = _only_tokens
    """(text, token ids or messages; the branch so far) -> token ids to insert, and images among them."""

    holds_grammars: Callable[[], bool] = lambda: False
    """Whether the engines say what a token was drawn from, without which no answer has a grammar."""
