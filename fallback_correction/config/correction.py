"""The settings that `correction.correct` applies to a batch, in the field's terms.

Notation: r = log pi_train - log pi_rollout of a sampled token, rho = exp(r). Every bound here bounds
rho itself, with the rollout in the denominator; verl's `*_k1` bounds, in contrast, bound 1 / rho.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.choices import require_choices
from fallback_correction.ranges import MAY_BE_INFINITE, above, at_least, require_ranges

WeightLevel = Literal["token", "sequence", "geometric"]
Level = Literal["none", "token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]
Statistic = Literal["ratio", "k1", "k2", "k3"]
Aggregation = Literal["token", "sum", "mean", "max"]
Nonfinite = Literal["error", "reject"]
VetoBy = Literal["ratio", "rollout_probability"]
Clamp = Annotated[float | None, above(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionRule:
    """A rule that keeps values within [lower, upper], both ends included."""

    statistic: Statistic = "ratio"
    """What of a token is compared: ratio rho; k1 = -r, k2 = r^2 / 2, k3 = exp(r) - r - 1 (Schulman,
    2020).

    The bounds of ratio and k1 bound rho; those of k2 and k3, which grow on both sides of rho = 1,
    bound the statistic itself.
    """

    aggregation: Aggregation = "token"
    """token: each by itself; sum, mean, max: one value for a sequence, which is kept or goes whole.

    Sums and means of ratios are taken of r, so that they are products and geometric means. The
    largest k1 of a sequence belongs to its smallest rho.
    """

    lower: float = -math.inf
    upper: float = math.inf

    def __post_init__(self) -> None:
        require_choices(self)
        require_bounds("lower", self.lower, "upper", self.upper)


@dataclass(frozen=True, slots=True, kw_only=True)
class Veto:
    """A rule that rejects a whole sequence for one token outside [lower, upper]; values are not
    clamped."""

    by: VetoBy = "ratio"
    """rho, as Miles' code does, or pi_rollout, as its documentation says."""

    lower: float = 0.0
    upper: float = math.inf

    def __post_init__(self) -> None:
        require_choices(self)
        require_bounds("lower", self.lower, "upper", self.upper)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    """Importance weights, rejection and normalisation of one optimizer step's global batch."""

    level: Level = "none"
    """Weight of a token: rho (token), the product of its sequence's (sequence), their geometric mean
    (geometric), or no weights at all (none)."""

    mode: Mode = "truncate"
    """truncate: min(w, upper); clip: into [lower, upper]; mask: reject what lies outside."""

    lower: Annotated[float, at_least(0)] = 0.0
    upper: Annotated[float, MAY_BE_INFINITE] = 2.0

    rules: tuple[RejectionRule, ...] = ()
    """All must keep a token. They need no weights."""

    veto: Veto | None = None

    second_moment: Annotated[float | None, above(0)] = None
    """M2PO (arXiv 2510.01161): reject the tokens of the largest r^2, until the mean of the others over
    the global batch is below this; None: none. They need no weights."""

    self_normalize: bool = False
    """Divide the weights of the tokens K that rules, veto and mode mask keep by their mean m over the
    global batch (self-normalised importance sampling), so that it is 1: m = sum_K w / |K| at level
    token; at the others, the mean weight of the sequences that have a token in K."""

    rejected_in_denominator: bool = True
    """Whether rejected tokens count in the denominators of the loss. In m they never do: their
    weights, which may be anything, would decide those of all others."""

    log_ratio_clamp: Clamp = 20.0
    """Log-ratios are cut to +- this before exp; None: never."""

    nonfinite: Nonfinite = "error"
    """A log-probability that is NaN or infinite: stop, or reject it (with its sequence, if anything
    here looks at sequences)."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_bounds("lower", self.lower, "upper", self.upper)
        require_ranges(self)

    @property
    def has_weights(self) -> bool:
        return self.level != "none"

    @property
    def needs_whole_batch(self) -> bool:
        """Return whether a token's weight depends on more of the global batch than its own sequence."""
        return (
            self.self_normalize
            or not self.rejected_in_denominator
            or self.second_moment is not None
        )

    @property
    def looks_at_sequences(self) -> bool:
        """Return whether a token's rejection or weight depends on the other tokens of its sequence."""
        return (
            self.level in ("sequence", "geometric")
            or self.veto is not None
            or any(rule.aggregation != "token" for rule in self.rules)
        )


def require_bounds(lower_name: str, lower: float, upper_name: str, upper: float) -> None:
    """Raise ValueError unless lower <= upper; NaN is refused."""
    if not lower <= upper:
        raise ValueError(
            f"{lower_name}={lower}, {upper_name}={upper}: the lower bound must not exceed the upper one."
        )
