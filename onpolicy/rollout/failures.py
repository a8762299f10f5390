"""Failures of episodes: a reason and a message."""

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
    """The function of a resumed episode behaves otherwise than before."""


class ContextExceededError(ValueError):
    """A branch would hold more tokens than an episode may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFailure:
    """The reason why an attempt at an episode failed."""

    reason: str
    """The kind: raised, context (more tokens than fit), result (an invalid result, or nothing
    sampled), deadline, hung or died (its process), drift (--chat-drift refuse)."""

    message: str
    """The message, with the last line of a traceback, if there is one."""

    said: tuple[Trajectory, ...] = field(default=(), compare=False)
    """The trajectories of its branches; empty where it failed as before, without being started."""

    @staticmethod
    def of(error: BaseException) -> EpisodeFailure:
        if isinstance(error, EpisodeTimeoutError):
            return EpisodeFailure(reason="deadline", message=str(error))
        inner = error.__cause__ if isinstance(error, AgentError) and error.__cause__ else error
        if isinstance(inner, ContextExceededError):
            return EpisodeFailure(reason="context", message=f"raised {describe(inner)}")
        if isinstance(error, AgentError):
            return EpisodeFailure(reason=error.reason, message=str(error))
        return EpisodeFailure(reason="raised", message=f"raised {describe(error)}")

    @property
    def error(self) -> AgentError:
        """The error that `of` converts into this failure."""
        return AgentError(self.message, reason=self.reason)


class WrittenFailures:
    """Failures of attempts at one episode, written beside its observations before they take effect.

    The clock may cause one, and a resumed or repeated run must fail the same attempts.

    {"number": 12, "key": "3/0/failed", "value": {"sampled": 0, "reason": ..., "message": ...}}

    `sampled`: the tokens that the first branch had sampled when the job of the failure began.
    """

    def __init__(self, observations: Observations, number: int, index: int):
        self._observations, self._number, self._index = observations, number, index

    def write(self, attempt: int, failure: EpisodeFailure, sampled: int) -> None:
        value = {"sampled": sampled, "reason": failure.reason, "message": failure.message}
        self._observations.note(self._number, self._key(attempt), value)

    def of(self, attempt: int, sampled: int | None = None) -> EpisodeFailure | None:
        """Return the failure of an attempt, if it failed; with `sampled`: if it failed by the job
        that begins with so many sampled tokens."""
        said = self._observations.known(self._number, self._key(attempt))
        if said is None or (sampled is not None and said["sampled"] > sampled):
            return None
        return EpisodeFailure(reason=said["reason"], message=said["message"])

    def _key(self, attempt: int) -> str:
        return f"{self._index}/{attempt}/failed"


def stops(name: str, failure: EpisodeFailure) -> AgentError:
    """Return the error that ends a run in which no episode may fail."""
    return AgentError(
        f"--episode-failures=stop: {name}: the episode {failure.message}. Mend its function, or have "
        "such episodes dropped or retried.",
        reason=failure.reason,
    )


def failed_this_time(name: str, failure: EpisodeFailure) -> OtherTokensError:
    """Return the error that ends a replay in which an episode fails that did not fail in the run."""
    return OtherTokensError(
        f"--replay: {name}: the episode {failure.message}, and in the run that is repeated it did not. "
        "Have it find what it found then."
    )


class EpisodeTimeoutError(TimeoutError):
    """An episode took longer than --episode-time-limit, sampling excluded."""
