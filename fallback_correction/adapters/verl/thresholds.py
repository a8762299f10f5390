"""verl's options of importance sampling and rejection, parsed from their strings.

rho = pi_train / pi_rollout. Bounds of `rollout_is_threshold` apply to rho, and bounds of the k1 options
to 1 / rho, since k1 = -log rho: "0.95_1.3" keeps rho = 0.9 and rejects rho = 1.15.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

from fallback_correction.choices import require_choice, require_choices

Spec = str | float | None

Option = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1",
    "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3", "binary_kl",
]  # fmt: skip
"""SUPPORTED_ROLLOUT_RS_OPTIONS of verl's commit 20c30bf8; `binary_kl` (KPop) is the newest."""

Statistic = Literal["k1", "k2", "k3", "binary_kl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionOption:
    """One entry of `rollout_rs`, which keeps statistics within [lower, upper], both ends included."""

    name: Option

    lower: float
    """Lower bound: for k1, of k1 itself, so the logarithm of the threshold; -inf for the others."""

    upper: float

    def __post_init__(self) -> None:
        require_choices(self)

    @property
    def statistic(self) -> Statistic:
        return cast(Statistic, self.name if self.name == "binary_kl" else self.name[-2:])

    @property
    def aggregation(self) -> str:
        """Return token, sum, mean or max."""
        return self.name.split("_")[1] if self.name.startswith("seq_") else "token"

    @property
    def two_sided(self) -> bool:
        return self.statistic == "k1"


def importance_bounds(threshold: str | float) -> tuple[float | None, float]:
    """Parse `rollout_is_threshold`: one number truncates weights there, "lower_upper" (IcePop) zeroes
    weights outside.

    Raises ValueError unless they are positive and in order.
    """
    lower, upper = _one_or_two("rollout_is_threshold", str(threshold))
    return lower, upper


def rejection_options(names: str, threshold: Spec) -> list[RejectionOption]:
    """Parse `rollout_rs` and `rollout_rs_threshold`, comma-separated lists; one threshold may serve all
    options.

    Repeated options count once. Raises ValueError for an unknown option, a wrong number of thresholds
    or a bad one.
    """
    options = list(dict.fromkeys(_parts(names)))
    if not options:
        raise ValueError(f"rollout_rs={names!r}: must name some of {', '.join(get_args(Option))}.")
    for name in options:
        require_choice("rollout_rs", name, Option)
    if threshold is None:
        raise ValueError(
            f"rollout_rs_threshold=None: rollout_rs={names!r} needs one. Example: 0.5_2.0 for k1."
        )
    specs = _parts(str(threshold))
    if len(specs) not in (1, len(options)):
        raise ValueError(
            f"rollout_rs_threshold={threshold!r}: {len(specs)} thresholds for {len(options)} options. "
            "Give one for each, or one for all."
        )
    specs = specs * len(options) if len(specs) == 1 else specs
    return [_option(cast(Option, name), spec) for name, spec in zip(options, specs, strict=True)]


def log(bound: float) -> float:
    """Return the logarithm of a bound, -inf for 0, which 1 / inf gives."""
    return math.log(bound) if bound else -math.inf


def _option(name: Option, spec: str) -> RejectionOption:
    lower, upper = _one_or_two("rollout_rs_threshold", spec)
    if name.endswith("k1"):
        lower = 1 / upper if lower is None else lower
        _require_order("rollout_rs_threshold", spec, lower, upper)
        return RejectionOption(name=name, lower=log(lower), upper=log(upper))
    if lower is not None:
        raise ValueError(
            f"rollout_rs_threshold={spec!r}: {name} has an upper bound only. Give one."
        )
    return RejectionOption(name=name, lower=-math.inf, upper=upper)


def _one_or_two(key: str, spec: str) -> tuple[float | None, float]:
    """Parse "upper" or "lower_upper", both positive."""
    try:
        bounds = [float(part) for part in spec.strip().split("_", 1)]
    except ValueError:
        bounds = [math.nan]
    if not all(bound > 0 for bound in bounds):
        raise ValueError(f"{key}={spec!r}: must be positive. Write 2.0, or 0.5_2.0 for two bounds.")
    if len(bounds) == 1:
        return None, bounds[0]
    _require_order(key, spec, *bounds)
    return bounds[0], bounds[1]


def _require_order(key: str, spec: str, lower: float, upper: float) -> None:
    if lower > upper:
        raise ValueError(
            f"{key}={spec!r}: the lower bound {lower} exceeds the upper one. Swap them."
        )


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
