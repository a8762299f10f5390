"""Rules for all episodes of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onpolicy.grammar import Grammar
from onpolicy.rollout.failures import OnFailure
from onpolicy.rollout.observations import Json, Observations
from onpolicy.trajectory import Trajectory


def _no_text(token_ids: Sequence[int]) -> str:
    raise ValueError("this episode has no tokenizer")


def _only_tokens(
    more: str | Sequence[int] | Sequence[Mapping[str, Json]], so_far: Trajectory
) -> list[int]:
    if isinstance(more, str) or not all(isinstance(token, int) for token in more):
        raise ValueError("this episode has no tokenizer: give token ids")
    return [*more]


def _no_grammar(grammar: Grammar) -> None:
    raise ValueError(f"{grammar.kind}: nothing holds the answers of this episode to it")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRules:
    """The rules for all episodes of a run."""

    max_context_len: int = sys.maxsize
    """The most tokens of a branch."""

    time_limit: float | None = None
    """The seconds that an episode may take, sampling excluded."""

    on_failure: OnFailure = "stop"

    is_repeated: bool = False
    """Whether a run is repeated: the attempts that failed in it fail, and no others, whatever their
    time."""

    observations: Observations = field(default_factory=Observations)
    decode: Callable[[list[int]], str] = _no_text
    tokens_of: Callable[..., list[int]] = _only_tokens
    """(text, token ids or messages; the branch so far) -> token ids to insert."""

    require_grammar: Callable[[Grammar], None] = _no_grammar
    """A check that raises ValueError for a grammar that cannot be enforced."""
