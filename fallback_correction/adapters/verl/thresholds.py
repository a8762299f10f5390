"""verl's options of importance sampling and rejection, parsed from their strings, and its presets.

rho = pi_train / pi_rollout. Bounds of `rollout_is_threshold` apply to rho, and bounds of the k1 options
to 1 / rho, since k1 = -log rho: "0.95_1.3" keeps rho = 0.9 and rejects rho = 1.15. `PRESETS` are verl's
named rollout corrections (verl/trainer/config/algorithm.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from fallback_correction.config import WeightLevel
from fallback_correction.ranges import require_choice, require_choices

Spec = str | float | None

Option = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1",
    "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3", "binary_kl",
]  # fmt: skip
"""SUPPORTED_ROLLOUT_RS_OPTIONS of verl's commit 20c30bf8; `binary_kl` (KPop) is the newest."""


def importance_bounds(threshold: str | float) -> tuple[float | None, float]:
    """Parse `rollout_is_threshold`: one number truncates, "lower_upper" (IcePop) zeroes weights outside.

    Raises ValueError unless they are positive and in order.
    """
    lower, upper = _one_or_two("rollout_is_threshold", str(threshold))
    return lower, upper


def rejection_options(names: str, threshold: Spec) -> list[RejectionOption]:
    """Parse `rollout_rs` and `rollout_rs_threshold`, lists with commas; one threshold may serve all.

    Repeated options count once. Raises ValueError for an unknown option, or thresholds that do not fit.
    """
    options = list(dict.fromkeys(_parts(names)))
    if not options:
        raise ValueError(f"rollout_rs={names!r}: must name some of {', '.join(get_args(Option))}.")
    if "seq_max_kl" in options:
        raise ValueError(
            "rollout_rs=seq_max_kl: needs whole distributions, and verl's rollout keeps the "
            "log-probabilities of sampled tokens alone. Use seq_max_k3, which estimates it."
        )
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


Level = WeightLevel
"""verl has token and sequence."""

LossType = Literal["ppo_clip", "reinforce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionConfig:
    """verl's keys and defaults; `importance_bounds` and `rejection_options` parse its thresholds."""

    rollout_is: Level | None = "sequence"
    rollout_is_threshold: str | float | None = 2.0

    rollout_is_taper: bool = False
    """TOPR, not in verl: tokens without a negative advantage weigh 1."""

    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: str | float | None = None

    bypass_mode: bool = False
    """Whether pi_rollout is the old policy. The trainer reads this and `loss_type`: the adapter
    computes weights and masks from the log-probabilities that it is given."""

    loss_type: LossType = "ppo_clip"
    """Loss in bypass mode: ppo_clip takes the mask and no weights, reinforce takes both."""

    def __post_init__(self) -> None:
        require_choices(self)


def _presets() -> dict[str, RolloutCorrectionConfig]:
    token = RolloutCorrectionConfig(rollout_is="token")
    sequence = RolloutCorrectionConfig(rollout_is="sequence")
    none = RolloutCorrectionConfig(rollout_is=None)
    icepop = replace(token, rollout_is_threshold="0.5_5.0")

    def geo(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
        return replace(config, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001")

    def k3(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
        return replace(config, rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01)

    def clip(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
        return replace(config, bypass_mode=True, loss_type="ppo_clip")

    def pg(config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
        return replace(config, bypass_mode=True, loss_type="reinforce")

    return {
        "decoupled_token_is": token,
        "decoupled_seq_is": sequence,
        "decoupled_token_icepop": icepop,
        "decoupled_seq_is_rs": replace(
            sequence, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"
        ),
        "decoupled_geo_rs": geo(none),
        "decoupled_geo_rs_seq_tis": geo(sequence),
        "decoupled_geo_rs_token_tis": geo(token),
        "decoupled_k3_rs": k3(none),
        "decoupled_k3_rs_seq_tis": k3(sequence),
        "decoupled_k3_rs_token_tis": k3(token),
        "bypass_ppo_clip": clip(none),
        "bypass_ppo_clip_geo_rs": clip(geo(none)),
        "bypass_ppo_clip_k3_rs": clip(k3(none)),
        "bypass_pg_is": pg(sequence),
        "bypass_pg_token_icepop": pg(icepop),
        "bypass_pg_geo_rs": pg(geo(none)),
        "bypass_pg_geo_rs_seq_tis": pg(geo(sequence)),
        "bypass_pg_geo_rs_token_tis": pg(geo(token)),
        "disabled": none,
    }


PRESETS = _presets()
"""Presets by the names of verl's factory methods. For other thresholds use dataclasses.replace."""
