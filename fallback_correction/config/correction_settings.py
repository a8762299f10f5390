"""Settings of importance sampling and rejection: as a user gives them, and as they are applied.

A user gives `CorrectionSettings`, under the names of Miles and slime. They make a `CorrectionConfig`,
which `correction.correct` applies to a batch, in the field's terms. Rejection may be by several metrics
at once, each with verl's name and its own bounds (`rejection_rules`).

Notation: r = log pi_train - log pi_rollout of a sampled token, rho = exp(r). Every bound here bounds
rho itself, with the rollout in the denominator; verl's `*_k1` bounds, in contrast, bound 1 / rho.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import (
    MAY_BE_INFINITE,
    FieldError,
    NotAbove,
    ReadBy,
    above,
    at_least,
    require_choices,
    require_ranges,
)

RatioLevel = Literal["token", "sequence", "geometric", "turn", "turn-geometric"]
WeightLevel = Literal["token", "sequence", "geometric", "turn", "turn-geometric", "prefix-min"]
Level = Literal[
    "none", "token", "sequence", "geometric", "turn", "turn-geometric", "prefix-min"
]  # fmt: skip
Mode = Literal["truncate", "clip", "mask", "taper"]
Statistic = Literal["ratio", "k1", "k2", "k3", "binary_kl", "kl"]
Aggregation = Literal["token", "sum", "mean", "max", "turn-sum", "turn-mean"]
Nonfinite = Literal["error", "reject"]
VetoBy = Literal["ratio", "rollout_probability"]
Clamp = Annotated[float | None, above(0)]

BY_TOKEN: tuple[Level, ...] = ("token", "prefix-min")
"""Levels at which each token has a weight of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    """Importance weights, rejection and normalisation of one optimizer step's global batch."""

    level: Level = "none"
    """Weight of a token: rho (token), the product over its sequence (sequence) or turn (turn), the
    geometric mean over it (geometric, turn-geometric), rho times the smallest rho of the tokens before
    it (prefix-min, MinPRO), or no weights (none)."""

    mode: Mode = "truncate"
    """Use of the bounds. truncate: min(w, upper); clip: into [lower, upper]; mask: reject weights
    outside; taper: min(w, upper) for a negative advantage, else 1 (TOPR)."""

    lower: Annotated[float, at_least(0)] = 0.0
    upper: Annotated[float, MAY_BE_INFINITE] = 2.0

    rules: tuple[RejectionRule, ...] = ()
    """Rules that must all keep a token. They need no weights."""

    veto: Veto | None = None

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
    def weighs_tokens(self) -> bool:
        """Return whether each token has a weight of its own."""
        return self.level in BY_TOKEN

    @property
    def bounds_kl(self) -> bool:
        """Return whether a rule needs `TokenBatch.kl`."""
        return any(rule.statistic == "kl" for rule in self.rules)

    @property
    def needs_whole_batch(self) -> bool:
        """Return whether a token's weight depends on more of the global batch than its own sequence."""
        return self.self_normalize or not self.rejected_in_denominator

    @property
    def looks_at_sequences(self) -> bool:
        """Return whether a token's rejection or weight depends on the other tokens of its sequence."""
        return (
            self.level not in ("none", "token")
            or self.veto is not None
            or any(rule.aggregation != "token" for rule in self.rules)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionRule:
    """A rule that keeps values within [lower, upper], both ends included."""

    statistic: Statistic = "ratio"
    """Statistic of a token: ratio rho; k1 = -r, k2 = r^2 / 2, k3 = exp(r) - r - 1 (Schulman, 2020);
    binary_kl, the larger of both KLs between this token and all others (KPop); kl, the KL of the
    rollout's distribution to the trainer's (TRM).

    The bounds of ratio and k1 bound rho; those of the others, which grow on both sides of rho = 1,
    bound the statistic itself.
    """

    aggregation: Aggregation = "token"
    """Aggregation over a sequence. token: each token by itself; sum, mean, max: one value for a
    sequence, which is kept or rejected whole; turn-sum, turn-mean: one for each of its turns.

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


def require_bounds(lower_name: str, lower: float, upper_name: str, upper: float) -> None:
    """Raise ValueError unless lower <= upper; NaN is refused."""
    if not lower <= upper:
        raise ValueError(
            f"{lower_name}={lower}, {upper_name}={upper}: the lower bound must not exceed the upper one."
        )


WEIGHTS = ReadBy("{use_tis}", lambda it: it.use_tis)
REJECTION = ReadBy("{use_rs}", lambda it: it.use_rs)
VETO = ReadBy("{rs_veto_threshold}", lambda it: it.rs_veto_threshold is not None)
EITHER = ReadBy(
    "{use_tis}, {use_rs} or {rs_veto_threshold}",
    lambda it: it.use_tis or it.use_rs or it.rs_veto_threshold is not None,
)
LOWER_BOUND = ReadBy(
    "{tis_mode} clip or mask, or {use_rs}",
    lambda it: it.use_rs or (it.use_tis and it.tis_mode in ("clip", "mask")),
)

APPLIED = CorrectionConfig()
"""Source of the defaults of fields that both records have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """Settings whose fields are flags of the same names; `correction` combines them."""

    use_tis: bool = False
    """Truncated importance sampling: weight each token's loss by the importance ratio pi_train /
    pi_rollout, to correct a rollout of engines that are not aligned."""

    use_rs: bool = False
    """Rejection sampling: leave out tokens or sequences whose ratio is out of bounds."""

    tis_level: Annotated[WeightLevel, WEIGHTS] = "token"
    """Ratio that weighs a token: its own (token), the product over its sequence (sequence), or the
    geometric mean over it (geometric). turn and turn-geometric are over its turn of the policy;
    prefix-min is its ratio times the smallest before it in its sequence (MinPRO)."""

    rs_level: Annotated[RatioLevel, REJECTION] = "token"
    """Ratio that rejects: a token's own (token), the product over a sequence (sequence), or the
    geometric mean over it (geometric); over a turn of the policy (turn, turn-geometric)."""

    tis_mode: Annotated[Mode, WEIGHTS] = APPLIED.mode
    """What the bounds do: `truncate` cuts weights at the upper bound, `clip` at both bounds, `mask`
    leaves tokens outside of the bounds out. `taper` truncates the weights of tokens with a negative
    advantage, and leaves the others at 1 (TOPR, whose upper bound is 1)."""

    tis_lower_bound: Annotated[
        float | None, at_least(0), NotAbove("tis_upper_bound"), LOWER_BOUND
    ] = None
    """Lower bound of weights. The default is 1 / --tis-upper-bound for clip, and none for mask."""

    tis_upper_bound: Annotated[float, above(0), MAY_BE_INFINITE] = APPLIED.upper
    """Upper bound of weights. All bounds refer to the ratio pi_train / pi_rollout."""

    rs_lower_bound: Annotated[float | None, at_least(0), NotAbove("rs_upper_bound"), REJECTION] = (
        None
    )
    """Lower bound of rejection. The default is --tis-lower-bound, or 1 / --tis-upper-bound."""

    rs_upper_bound: Annotated[float | None, at_least(0), MAY_BE_INFINITE, REJECTION] = None
    """Upper bound of rejection. The default is --tis-upper-bound."""

    rs_rules: Annotated[tuple[str, ...], REJECTION] = ()
    """Reject by these metrics instead, each by verl's name with bounds of its own, all of which a
    token has to keep: token_k1=0.5_2 seq_mean_k3=0.01. Bounds of k1 are of pi_train / pi_rollout."""

    rs_veto_threshold: Annotated[float | None, at_least(0)] = None
    """Reject a whole sequence if the ratio of one token is below this. By default there is no veto."""

    rs_veto_by: Annotated[VetoBy, VETO] = "ratio"
    """What of that token: its ratio, or the probability that the rollout gave it."""

    tis_batch_normalize: Annotated[bool, WEIGHTS] = APPLIED.self_normalize
    """Divide the weights by their mean over the tokens of the global batch that are not rejected."""

    rejected_in_denominator: Annotated[bool, EITHER] = APPLIED.rejected_in_denominator
    """Count rejected tokens in the denominators of the loss."""

    tis_log_ratio_clamp: Annotated[Clamp, EITHER] = APPLIED.log_ratio_clamp
    """Log-ratios are cut to +- this before exp."""

    tis_nonfinite: Nonfinite = APPLIED.nonfinite
    """What to do with log-probabilities that are NaN or infinite: end the run (error), or reject the
    token (reject)."""

    def __post_init__(self) -> None:
        require_choices(self)
        require_ranges(self)
        rejection_rules("rs_rules", self.rs_rules)

    @property
    def weight_bounds(self) -> tuple[float, float]:
        """Return the bounds of weights. Mode mask has a lower bound only if one is given, as in MIS
        (arXiv 2602.01826, eq. 6)."""
        fallback = 1 / self.tis_upper_bound if self.tis_mode == "clip" else 0.0
        return _or(self.tis_lower_bound, fallback), self.tis_upper_bound

    @property
    def rejection_bounds(self) -> tuple[float, float]:
        """Return the bounds of the ratio that rejects."""
        lower = _or(self.tis_lower_bound, 1 / self.tis_upper_bound)
        return _or(self.rs_lower_bound, lower), _or(self.rs_upper_bound, self.tis_upper_bound)

    def correction(self) -> CorrectionConfig:
        """Return the correction to apply. Raises ValueError for bounds with contradictory defaults."""
        lower, upper = self.weight_bounds
        threshold = self.rs_veto_threshold
        return CorrectionConfig(
            level=self.tis_level if self.use_tis else "none",
            mode=self.tis_mode,
            lower=lower,
            upper=upper,
            rules=self._rejection_rules() if self.use_rs else (),
            veto=None if threshold is None else Veto(by=self.rs_veto_by, lower=threshold),
            self_normalize=self.tis_batch_normalize,
            rejected_in_denominator=self.rejected_in_denominator,
            log_ratio_clamp=self.tis_log_ratio_clamp,
            nonfinite=self.tis_nonfinite,
        )

    def _rejection_rules(self) -> tuple[RejectionRule, ...]:
        if self.rs_rules:
            return rejection_rules("rs_rules", self.rs_rules)
        lower, upper = self.rejection_bounds
        return (RejectionRule(aggregation=AGGREGATIONS[self.rs_level], lower=lower, upper=upper),)


AGGREGATIONS: dict[RatioLevel, Aggregation] = {
    "token": "token",
    "turn": "turn-sum",
    "turn-geometric": "turn-mean",
    "sequence": "sum",
    "geometric": "mean",
}


def _or(value: float | None, fallback: float) -> float:
    return fallback if value is None else value


METRICS: dict[str, tuple[Statistic, Aggregation]] = {
    "token_k1": ("k1", "token"), "token_k2": ("k2", "token"), "token_k3": ("k3", "token"),
    "seq_sum_k1": ("k1", "sum"), "seq_sum_k2": ("k2", "sum"), "seq_sum_k3": ("k3", "sum"),
    "seq_mean_k1": ("k1", "mean"), "seq_mean_k2": ("k2", "mean"), "seq_mean_k3": ("k3", "mean"),
    "seq_max_k2": ("k2", "max"), "seq_max_k3": ("k3", "max"), "token_binary_kl": ("binary_kl", "token"),
    "seq_max_kl": ("kl", "max"),
}  # fmt: skip
"""Statistics of tokens or sequences, by their names in verl's `rollout_rs` where it has them."""

EXAMPLE = "Write NAME=UPPER or NAME=LOWER_UPPER, as in token_k1=0.5_2 or seq_mean_k3=0.01."


def rejection_rules(field: str, texts: Sequence[str]) -> tuple[RejectionRule, ...]:
    """Parse rules such as `seq_mean_k3=0.01` and `token_k1=0.5_2`.

    Bounds of k1 apply to rho = pi_train / pi_rollout (verl's apply to 1 / rho); a single number is the
    upper bound, and 1 / upper the lower. The others have only an upper bound. Raises FieldError for a
    text that is no rule, or that repeats a metric.
    """
    names = [text.partition("=")[0] for text in texts]
    for name in names:
        if names.count(name) > 1:
            raise FieldError(field, " ".join(texts), f"{name} is there twice. Give it once.")
    return tuple(_rule(field, text) for text in texts)


def _rule(field: str, text: str) -> RejectionRule:
    name, _, bounds = text.partition("=")
    if name not in METRICS:
        raise FieldError(field, text, f"no such metric. Use one of {', '.join(METRICS)}. {EXAMPLE}")
    statistic, aggregation = METRICS[name]
    try:
        numbers = [float(part) for part in bounds.split("_")]
    except ValueError:
        numbers = []
    most = 2 if statistic == "k1" else 1
    if not 1 <= len(numbers) <= most or not all(0 < x < math.inf for x in numbers):
        what = "one positive number" if most == 1 else "one or two positive numbers"
        raise FieldError(field, text, f"{name} has {what} for bounds. {EXAMPLE}")
    *low, upper = numbers
    lower = low[0] if low else 1 / upper if statistic == "k1" else -math.inf
    if lower > upper:
        raise FieldError(
            field, text, f"the lower bound {lower:g} is above the upper one. {EXAMPLE}"
        )
    return RejectionRule(statistic=statistic, aggregation=aggregation, lower=lower, upper=upper)
