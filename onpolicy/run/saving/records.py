"""The JSON schema of the rollouts in a checkpoint."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from annotated_types import Ge, Len
from pydantic import with_config
from typing_extensions import TypedDict

from onpolicy.outputs.trajectories import Count, TrajectoryRecord
from onpolicy.system.records import CLOSED
from onpolicy.types import Term

Weight = Annotated[float, Ge(0)]


@with_config(CLOSED)
class Sample(TypedDict):
    index: Count
    trajectory: TrajectoryRecord
    seeds: NotRequired[list[Annotated[list[Count], Len(2, 2)]]]
    """The (seed, number of tokens) of each part; absent in earlier versions."""
    response: str
    reward: float | None
    """The reward, or None if the sample could not be scored (0 in checkpoints of earlier versions)."""

    reward_parts: dict[str, float]
    has_failed: NotRequired[bool]
    is_rewarded: bool
    token_rewards: list[float] | None
    token_weights: NotRequired[dict[Term, list[Weight]]]
    metrics: dict[str, float]
    info: dict[str, Any]


@with_config(CLOSED)
class Group(TypedDict):
    prompt: Count
    number: Count
    samples: list[Sample]
    greedy: NotRequired[Sample]


@with_config(CLOSED)
class Answer(TypedDict):
    end: Count
    finish_reason: str


@with_config(CLOSED)
class Branch(TypedDict):
    key: list[str]
    trajectory: TrajectoryRecord
    answers: list[Answer]


@with_config(CLOSED)
class Result(TypedDict):
    trajectories: list[TrajectoryRecord]
    reward: float | None
    rewards: list[float] | None
    token_rewards: list[list[float]] | None
    token_weights: NotRequired[dict[Term, list[list[Weight]]]]
    metrics: dict[str, float]
    info: dict[str, Any]


@with_config(CLOSED)
class Failure(TypedDict):
    reason: str
    message: str
    said: NotRequired[list[TrajectoryRecord]]


@with_config(CLOSED)
class Episode(TypedDict):
    branches: list[Branch]
    failures: list[Failure]
    result: Result | None
    """The outcome of a complete episode."""


@with_config(CLOSED)
class OpenGroup(TypedDict):
    number: Count
    episodes: list[Episode]
    observations: dict[str, Any]
    """The observations by key (`rollout/observations.py`)."""


@with_config(CLOSED)
class FailedAttempt(TypedDict):
    prompt: Count
    group: NotRequired[Count]
    sample: Count
    attempt: Count
    reason: str
    message: str
    said: list[TrajectoryRecord]


@with_config(CLOSED)
class Drawn(TypedDict):
    metrics: dict[str, float]
    groups: list[Group]
    failed: NotRequired[list[FailedAttempt]]


@with_config(CLOSED)
class Curriculum(TypedDict):
    step: Count
    position: Count
    chosen: dict[str, Count]
    rates: dict[str, list[float]]
    measured: list[list[float]]


@with_config(CLOSED)
class Rollouts(TypedDict):
    next_number: Count
    open: list[OpenGroup]
    ready: list[Group]
    drawn: dict[str, Drawn]
    curriculum: NotRequired[Curriculum]
