"""Proxy for a branch of an episode in a worker process; the real branch lives in the run's process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

from onpolicy.rollout.turns import Answer, Turns
from onpolicy.trajectory import Completion, FinishReason, Span, Trajectory
from onpolicy.types import Request

Json = Any


class Caller(Protocol):
    """A caller of branch methods in the run's process; each method raises the error raised there."""

    async def call(self, method: str, branch: int, arguments: Mapping[str, Json]) -> Json:
        """Call a method while other episodes go on."""

    def call_now(self, method: str, branch: int, arguments: Mapping[str, Json]) -> Json:
        """Call a method and block the event loop until there is an answer."""

    async def observe(self, branch: int, make: Callable[[], Awaitable[Json]]) -> Json:
        """Return the observed value; `make` is called here if the run does not know the value."""


class RemoteTurns(Turns):
    """A branch whose changes go through its methods alone.

    It belongs to the worker's event loop: no thread may use it.
    """

    def __init__(
        self,
        caller: Caller,
        number: int,
        request: Request,
        trajectory: Trajectory,
        key: tuple[str, ...],
        max_context_len: int,
    ):
        rules = SimpleNamespace(max_context_len=max_context_len)
        of_run: Any = SimpleNamespace(past={}, rules=rules)
        super().__init__(of_run, request, trajectory, key)
        self._caller, self.number = caller, number

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
        arguments = {
            "stop": stop if isinstance(stop, str) else [*stop],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "regex": regex,
            "json_schema": json_schema,
            "structural_tag": structural_tag,
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
            self.answers.append((len(self.trajectory.token_ids), reason))
        return Answer(
            token_ids=token_ids,
            log_probs=said["log_probs"],
            finish_reason=reason,
            decode=lambda _: _text(said),
        )

    def append(self, more: str | Sequence[int] | Sequence[Mapping[str, Json]]) -> None:
        more = more if isinstance(more, str) else [*more]
        said = self._caller.call_now("append", self.number, {"more": more})
        self.trajectory = self.trajectory.given(said)

    def fork(self, length: int | None = None, *, key: str | None = None) -> RemoteTurns:
        said = self._caller.call_now("fork", self.number, {"length": length, "key": key})
        return RemoteTurns(
            self._caller,
            said["branch"],
            replace(self.request, sampling_seed=said["seed"]),
            self.trajectory.forked(said["length"], said["key"]),
            (*self.key, said["key"]),
            self.episode.rules.max_context_len,
        )

    async def observe(self, make: Callable[[], Awaitable[Json]]) -> Json:
        return await self._caller.observe(self.number, make)


def _text(said: Mapping[str, Json]) -> str:
    text: str | None = said["text"]
    if text is None:
        raise ValueError(said["no_text"])
    return text
