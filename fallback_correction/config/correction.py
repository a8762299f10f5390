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
    """Statistic of a token: ratio rho; k1 = -r, k2 = r^2 / 2, k3 = exp(r) - r - 1 (Schulman, 2020).

    The bounds of ratio and k1 bound rho; the bounds of k2 and k3, which grow on both sides of rho = 1,
    bound the statistic itself.
    """

    aggregation: Aggregation = "token"
    """Aggregation over a sequence. token: each token by itself; sum, mean, max: one value for a
    sequence, which is kept or rejected whole.

    Sums and means of ratios are taken of r, so that they are products and geometric means. The largest
    k1 of a sequence belongs to its smallest rho.
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
    """Statistic of the veto: rho, as in Miles' code, or pi_rollout, as in its documentation."""

    lower: float = 0.0
    upper: float = math.inf

    def __post_init__(self) -> None:
        require_choices(self)
        require_bounds("lower", self.lower, "upper", self.upper)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    """Importance weights, rejection and normalisation of one optimizer step's global batch."""

    level: Level = "none"
    """Weight of a token: rho (token), the product over its sequence (sequence), the geometric mean over
    it (geometric), or no weights (none)."""

    mode: Mode = "truncate"
    """Use of the bounds. truncate: min(w, upper); clip: into [lower, upper]; mask: reject weights
    outside."""

    lower: Annotated[float, at_least(0)] = 0.0
    upper: Annotated[float, MAY_BE_INFINITE] = 2.0

    rules: tuple[RejectionRule, ...] = ()
    """Rules that must all keep a token. They need no weights."""

    veto: Veto | None = None

    second_moment: Annotated[float | None, above(0)] = None
    """Limit of M2PO (arXiv 2510.01161): reject the tokens of the largest r^2, until the mean of the
    others over the global batch is below this; None: no limit. It needs no weights."""

    self_normalize: bool = False
    """Whether to divide the weights of the kept tokens K by their mean m over the global batch
    (self-normalised importance sampling), so that their mean is 1: m = sum_K w / |K| at level token; at
    the others, the mean weight of the sequences that have a token in K."""

    rejected_in_denominator: bool = True
    """Whether rejected tokens count in the denominators of the loss. They never count in m: their
    weights, which may be anything, would scale all others."""

    log_ratio_clamp: Clamp = 20.0
    """Limit to which log-ratios are clamped before exp; None: no clamp."""

    nonfinite: Nonfinite = "error"
    """Treatment of a NaN or infinite log-probability: raise an error, or reject the token (with its
    sequence, if any setting here looks at sequences)."""

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
