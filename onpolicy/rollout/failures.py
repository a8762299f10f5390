"""Episodes that fail: why, in a word and in a line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from onpolicy.errors import AgentError, OnPolicyError
from onpolicy.rollout.observations import Observations
from onpolicy.system.user_functions import describe
from onpolicy.trajectory import Trajectory

OnFailure = Literal["drop", "retry", "stop"]

RETRIES = 3
"""Attempts at an episode after the first, with `retry`."""


class OtherTokensError(OnPolicyError, ValueError):
    """The function of an episode that goes on is another than before."""


class ContextExceededError(ValueError):
    """A branch would hold more tokens than an episode may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFailure:
    """Why an attempt at an episode came to nothing."""

    reason: str
    """raised, context (more tokens than fit), result (returned nonsense, or sampled nothing), deadline,
    hung or died (its process), drift (--chat-drift refuse)."""

    message: str
    """With the last line of a traceback, if there is one."""

    said: tuple[Trajectory, ...] = field(default=(), compare=False)
    """What its branches had come to; nothing sampled where it failed as before, without being begun."""

    @staticmethod
    def of(error: BaseException) -> EpisodeFailure:
        if isinstance(error, TimeoutError) and isinstance(error, EpisodeTimeoutError):
            return EpisodeFailure(reason="deadline", message=str(error))
        inner = error.__cause__ if isinstance(error, AgentError) and error.__cause__ else error
        if isinstance(inner, ContextExceededError):
            return EpisodeFailure(reason="context", message=f"raised {describe(inner)}")
        if isinstance(error, AgentError):
            return EpisodeFailure(reason=error.reason, message=str(error))
        return EpisodeFailure(reason="raised", message=f"raised {describe(error)}")

    @property
    def error(self) -> AgentError:
        """What `of` makes it of again."""
        return AgentError(self.message, reason=self.reason)


class WrittenFailures:
    """Why attempts at one episode failed, written beside what was observed before anything follows from
    it: the clock may have decided that, and a run that goes on or is repeated has the same ones fail.

        {"number": 12, "key": "3/0/failed", "value": {"sampled": 0, "reason": ..., "message": ...}}

    `sampled`: what its first branch had sampled when the round in which it failed began.
    """

    def __init__(self, observations: Observations, number: int, index: int):
        self._observations, self._number, self._index = observations, number, index

    def write(self, attempt: int, failure: EpisodeFailure, sampled: int) -> None:
        value = {"sampled": sampled, "reason": failure.reason, "message": failure.message}
        self._observations.note(self._number, self._key(attempt), value)

    def of(self, attempt: int, sampled: int | None = None) -> EpisodeFailure | None:
        """Why it failed, if it did; `sampled`: by a round that begins with so many tokens."""
        said = self._observations.known(self._number, self._key(attempt))
        if said is None or (sampled is not None and said["sampled"] > sampled):
            return None
        return EpisodeFailure(reason=said["reason"], message=said["message"])

    def _key(self, attempt: int) -> str:
        return f"{self._index}/{attempt}/failed"


def stops(name: str, failure: EpisodeFailure) -> AgentError:
    """What ends a run of which no episode may fail."""
    return AgentError(
        f"--episode-failures=stop: {name}: the episode {failure.message}. Mend its function, or have "
        "such episodes dropped or retried.",
        reason=failure.reason,
    )


def failed_this_time(name: str, failure: EpisodeFailure) -> OtherTokensError:
    """What ends a replay of which an episode fails that did not."""
    return OtherTokensError(
        f"--replay: {name}: the episode {failure.message}, and in the run that is repeated it did not. "
        "Have it find what it found then."
    )


class EpisodeTimeoutError(TimeoutError):
    """An episode took longer than --episode-time-limit besides sampling."""
