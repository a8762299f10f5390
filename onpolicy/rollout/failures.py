"""Episodes that fail: why, in a word and in a line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onpolicy.errors import AgentError, OnPolicyError
from onpolicy.system.user_functions import describe

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


class EpisodeTimeoutError(TimeoutError):
    """An episode took longer than --episode-time-limit besides sampling."""
