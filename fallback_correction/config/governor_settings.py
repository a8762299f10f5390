"""The limits at which the governor moves between its rungs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import (
    above,
    at_least,
    at_most,
    below,
    require_choices,
    require_ranges,
)

Limit = Annotated[float, above(0)]
Share = Annotated[float, above(0), at_most(1)]
Rollouts = Annotated[int, at_least(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorConfig:
    """Limits of the governor: a rollout is bad if one distance is beyond its limit, calm if all are
    well within."""

    k3: Limit = 1e-3
    """Largest mismatch/k3, in nats per token. Above it a rollout counts as bad."""

    ess: Annotated[float, above(0), below(1)] = 0.95
    """Smallest mismatch/ess, a share of the batch."""

    log_ppl_abs_diff: Limit = 0.01
    """Largest mismatch/log_ppl_abs_diff: the mean difference of a sequence's log-perplexities, in nats
    per token."""

    rise_after: Rollouts = 2
    """Number of consecutive bad rollouts after which a stronger correction is chosen."""

    fall_after: Rollouts = 10
    """Number of consecutive calm rollouts after which a weaker correction is chosen. The number doubles
    after every fall."""

    calm: Share = 0.5
    """Share of the limits below which a rollout is calm: the hysteresis."""

    lr_scale: Annotated[float, at_least(0)] = 0.5
    """Factor of the learning rate on the rung `decay`."""

    highest: Literal["tis", "mis", "decay", "aligned"] = "aligned"
    """Strongest correction that may be chosen."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_ranges(self)
