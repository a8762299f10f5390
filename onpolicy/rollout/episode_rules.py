"""What holds for all episodes of a run, and whom they tell what they ask for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from onpolicy.rollout.failures import OnFailure
from onpolicy.rollout.observations import Observations
from onpolicy.rollout.turns import Json, Turns
from onpolicy.trajectory import Trajectory

if TYPE_CHECKING:
    from onpolicy.rollout.open_episode import OpenEpisode


def _no_text(token_ids: Sequence[int]) -> str:
    raise ValueError("this episode has no tokenizer")


def _only_tokens(
    more: str | Sequence[int] | Sequence[Mapping[str, Json]], so_far: Trajectory
) -> list[int]:
    if isinstance(more, str) or not all(isinstance(token, int) for token in more):
        raise ValueError("this episode has no tokenizer: give token ids")
    return [*more]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """What holds for all episodes of a run."""

    max_context_len: int = sys.maxsize
    """Most tokens of a branch."""

    time_limit: float | None = None
    """Seconds that an episode may take besides sampling."""

    on_failure: OnFailure = "stop"
    observations: Observations = field(default_factory=Observations)
    decode: Callable[[list[int]], str] = _no_text
    tokens_of: Callable[..., list[int]] = _only_tokens
    """(text, token ids or messages; the branch so far) -> tokens to be given."""


class Listener(Protocol):
    """Draws what episodes ask for. Called from any thread."""

    def asked(self, branch: Turns) -> None:
        """The branch waits for the policy; `branch.ask` says for how much."""

    def ended(self, episode: OpenEpisode) -> None:
        """The episode is complete, or has failed."""
