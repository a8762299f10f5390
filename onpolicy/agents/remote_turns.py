"""A branch of an episode, as a function in a worker process sees it; the true one is with the run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from onpolicy.rollout.episodes import Answer
from onpolicy.trajectory import Completion, FinishReason, Span, Trajectory

Json = Any


class Caller(Protocol):
    """Has methods of branches called in the run's process; both raise what they raise there."""

    async def call(self, method: str, branch: int, arguments: Mapping[str, Json]) -> Json:
        """Let others go on meanwhile."""

    def call_now(self, method: str, branch: int, arguments: Mapping[str, Json]) -> Json:
        """Let nobody go on before there is an answer."""

    async def observe(self, branch: int, make: Callable[[], Awaitable[Json]]) -> Json:
        """`make` is called here, if the value is not known already."""


class RemoteTurns:
    """`Turns`, with the same methods. To be used in the event loop alone, by one task at a time."""

    def __init__(
        self, caller: Caller, number: int, trajectory: Trajectory, num_left: int, room: int
    ):
        self._caller, self.number = caller, number
        self.trajectory = trajectory
        """A copy: what is changed in it is changed nowhere else."""

        self._most_sampled = num_left + trajectory.num_sampled
        self._most = room + len(trajectory.token_ids)

    async def sample(
        self,
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> Answer:
        """As `Turns.sample`."""
        arguments = {
            "stop": stop if isinstance(stop, str) else [*stop],
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        said = await self._caller.call("sample", self.number, arguments)
        token_ids, reason = said["token_ids"], FinishReason(said["finish_reason"])
        if token_ids:
            completion = Completion(
                response_ids=token_ids,
                rollout_log_probs=said["log_probs"],
                finish_reason=reason,
                weight_version=said["weight_version"],
                num_cached_tokens=said["num_cached_tokens"],
                spans=tuple(Span(version=v, start=s, end=e) for v, s, e in said["spans"]),
            )
            self.trajectory = self.trajectory.plus(completion, said["temperature"])
        return Answer(
            token_ids=token_ids,
            log_probs=said["log_probs"],
            finish_reason=reason,
            decode=lambda _: _text(said),
        )

    def append(self, more: str | Sequence[int] | Sequence[Mapping[str, Json]]) -> None:
        """As `Turns.append`."""
        more = more if isinstance(more, str) else [*more]
        said = self._caller.call_now("append", self.number, {"more": more})
        self.trajectory = self.trajectory.given(said)

    give = append

    def fork(self, length: int | None = None, *, key: str | None = None) -> RemoteTurns:
        """As `Turns.fork`."""
        said = self._caller.call_now("fork", self.number, {"length": length, "key": key})
        shared = self.trajectory.forked(said["length"], said["key"])
        return RemoteTurns(self._caller, said["branch"], shared, said["num_left"], said["room"])

    async def observe(self, make: Callable[[], Awaitable[Json]]) -> Json:
        """As `Turns.observe`."""
        return await self._caller.observe(self.number, make)

    @property
    def num_left(self) -> int:
        """As `Turns.num_left`."""
        return self._most_sampled - self.trajectory.num_sampled

    @property
    def room(self) -> int:
        """As `Turns.room`."""
        return self._most - len(self.trajectory.token_ids)


def _text(said: Mapping[str, Json]) -> str:
    text: str | None = said["text"]
    if text is None:
        raise ValueError(said["no_text"])
    return text
