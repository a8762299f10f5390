"""Settings of the learning rate's halving, and of the detector of a surge of the response length."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fallback_correction.ranges import (
    NotAbove,
    above,
    at_least,
    at_most,
    below,
    require_ranges,
)

Steps = Annotated[int, at_least(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SurgeDetectorConfig:
    """Settings of the surge detector. Steps are rollout steps, counted from 1.

    Raises ValueError for settings under which no surge can be found.
    """

    burn_in: Steps = 10
    """A rise of the length that begins in these rollouts is no surge: early jumps are a format being
    learnt, and 1.8 times their onset would be no period."""

    baseline_window: Steps = 40
    """Rollouts before the rise whose upper quartile is the baseline. A larger window forgives longer
    dips, a smaller one forgets sooner how long the responses were at the start."""

    rise_ratio: Annotated[float, above(1)] = 2.0
    """Rise of the mean response length, over its baseline, that is a surge."""

    onset_ratio: Annotated[float, above(1), NotAbove("rise_ratio")] = 1.25
    """The onset is the first rollout of the rise above this many times the baseline."""

    confirmation_steps: Annotated[
        int, at_least(1), NotAbove("max_rise_steps"), NotAbove("slow_rise_steps")
    ] = 5
    """Consecutive rollouts that must have the rise ratio."""

    max_rise_steps: Steps = 20
    """Rollouts from the onset to the confirmation of a fast rise at most."""

    slow_rise_steps: Steps = 45
    """Rollouts from the onset to the confirmation of a slow rise at most."""

    level_ratio: Annotated[float, at_least(1)] = 1.1
    """A slow rise starts from a level: the median of the newer half of the baseline's window is at most
    this many times that of the older half. What rises from the start is growth."""

    max_truncated_ratio: Annotated[float, at_least(0), below(1)] = 0.8
    """Shares of truncated responses above this are taken as this: they correct the mean length, and the
    correction is bounded."""

    def __post_init__(self) -> None:
        require_ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthDecayConfig:
    """Settings of arXiv 2602.01826, Algorithm 1. Steps are rollout steps, counted from 1."""

    period: Annotated[int | None, at_least(1)] = None
    """Number of rollouts between two halvings. The default is 1.8 times the step of the length surge."""

    default_period: Annotated[int, at_least(0)] = 160
    """Period if no surge was seen in this many rollouts; 160 kept both models of the paper stable. With
    0 the rate is not halved without a surge."""

    factor: Annotated[float, above(1)] = 2.0
    """What each decay divides the rate by: 2 halves it."""

    onset_multiplier: Annotated[float, above(0)] = 1.8
    """The period over the step of the surge, where the period is not given."""

    floor: Annotated[float, above(0), at_most(1)] = 0.1
    """Smallest share of the rate that is left."""

    detector: SurgeDetectorConfig = field(default_factory=SurgeDetectorConfig)
    """What counts as a surge."""

    def __post_init__(self) -> None:
        require_ranges(self)
