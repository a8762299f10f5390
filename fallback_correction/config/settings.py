"""Settings of importance sampling and rejection as a user gives them, under the names of Miles and
slime."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.choices import require_choices
from fallback_correction.config.correction import (
    Aggregation,
    Clamp,
    CorrectionConfig,
    Mode,
    Nonfinite,
    RejectionRule,
    Veto,
    VetoBy,
    WeightLevel,
)
from fallback_correction.config.rejection_rules import rejection_rules
from fallback_correction.ranges import (
    MAY_BE_INFINITE,
    FieldError,
    NotAbove,
    ReadBy,
    above,
    at_least,
    require_ranges,
)

WEIGHTS = ReadBy("{use_tis}", lambda it: it.use_tis)
REJECTION = ReadBy("{use_rs}", lambda it: it.use_rs)
VETO = ReadBy("{rs_veto_threshold}", lambda it: it.rs_veto_threshold is not None)
EITHER = ReadBy(
    "{use_tis}, {use_rs}, {rs_veto_threshold} or {m2po_threshold}",
    lambda it: (
        it.use_tis or it.use_rs or it.rs_veto_threshold is not None or it.m2po_threshold is not None
    ),
)
LOWER_BOUND = ReadBy(
    "{tis_mode} clip or mask, or {use_rs}",
    lambda it: it.use_rs or (it.use_tis and it.tis_mode != "truncate"),
)

APPLIED = CorrectionConfig()
"""Source of the defaults of fields that both records have."""

AGGREGATIONS: dict[WeightLevel, Aggregation] = {
    "token": "token",
    "sequence": "sum",
    "geometric": "mean",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """Settings whose fields are flags of the same names; `correction` combines them."""

    use_tis: bool = False
    """Correct an unaligned rollout: weight tokens by the importance ratio pi_train / pi_rollout."""

    use_rs: bool = False
    """Reject tokens or sequences whose ratio is out of bounds."""

    tis_level: Annotated[WeightLevel, WEIGHTS] = "token"
    """Ratio of a token, product over its sequence, or geometric mean over it."""

    rs_level: Annotated[WeightLevel, REJECTION] = "token"
    """What is rejected by: the ratio of a token, the product over its sequence, or the geometric
    mean."""

    tis_mode: Annotated[Mode, WEIGHTS] = APPLIED.mode
    """Cut weights at the upper bound, at both bounds, or leave out what lies outside."""

    tis_lower_bound: Annotated[
        float | None, at_least(0), NotAbove("tis_upper_bound"), LOWER_BOUND
    ] = None
    """clip: 1 / --tis-upper-bound if not given; mask: none if not given."""

    tis_upper_bound: Annotated[float, above(0), MAY_BE_INFINITE] = APPLIED.upper
    """Largest weight. All bounds bound the ratio pi_train / pi_rollout."""

    rs_statistic: Annotated[Literal["ratio", "k2", "k3"], REJECTION] = "ratio"
    """What the bounds of rejection bound: the ratio, or with --rs-upper-bound alone a divergence, k2 or
    k3: of a token, its sum over a sequence, or (geometric) its mean."""

    rs_lower_bound: Annotated[float | None, at_least(0), NotAbove("rs_upper_bound"), REJECTION] = (
        None
    )
    """--tis-lower-bound if not given, or 1 / --tis-upper-bound."""

    rs_upper_bound: Annotated[float | None, at_least(0), MAY_BE_INFINITE, REJECTION] = None
    """--tis-upper-bound if not given."""

    rs_rules: Annotated[tuple[str, ...], REJECTION] = ()
    """Reject by several metrics instead, each by verl's name with bounds of its own, all of which a
    token has to keep: token_k1=0.5_2 seq_mean_k3=0.01. Bounds of k1 are of pi_train / pi_rollout."""

    m2po_threshold: Annotated[float | None, above(0)] = None
    """M2PO: reject the tokens of the largest squared log-ratio, until the mean of the others over the
    global batch is below this."""

    rs_veto_threshold: Annotated[float | None, at_least(0)] = None
    """Reject a whole sequence for one token below it."""

    rs_veto_by: Annotated[VetoBy, VETO] = "ratio"
    """What of that token: its ratio, or the probability that the rollout gave it."""

    tis_batch_normalize: Annotated[bool, WEIGHTS] = APPLIED.self_normalize
    """Divide the weights by the mean, over the global batch, of those that are not rejected."""

    rejected_in_denominator: Annotated[bool, EITHER] = APPLIED.rejected_in_denominator
    """Count rejected tokens in the denominators of the loss."""

    tis_log_ratio_clamp: Annotated[Clamp, EITHER] = APPLIED.log_ratio_clamp
    """Log-ratios are cut to +- this before exp."""

    tis_nonfinite: Nonfinite = APPLIED.nonfinite
    """What to do with log-probabilities that are NaN or infinite."""

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
        """Return the bounds of the ratio, or of the divergence that replaces it, which has no lower
        bound."""
        if self.rs_statistic != "ratio":
            return -math.inf, _or(self.rs_upper_bound, math.inf)
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
            second_moment=self.m2po_threshold,
            veto=None if threshold is None else Veto(by=self.rs_veto_by, lower=threshold),
            self_normalize=self.tis_batch_normalize,
            rejected_in_denominator=self.rejected_in_denominator,
            log_ratio_clamp=self.tis_log_ratio_clamp,
            nonfinite=self.tis_nonfinite,
        )

    def _rejection_rules(self) -> tuple[RejectionRule, ...]:
        if self.rs_rules:
            return rejection_rules("rs_rules", self.rs_rules)
        if self.rs_statistic != "ratio" and self.rs_upper_bound is None:
            raise FieldError(
                "rs_upper_bound", None, f"rs_statistic={self.rs_statistic} needs one. Give 0.01."
            )
        lower, upper = self.rejection_bounds
        rule = RejectionRule(
            statistic=self.rs_statistic,
            aggregation=AGGREGATIONS[self.rs_level],
            lower=lower,
            upper=upper,
        )
        return (rule,)


def _or(value: float | None, fallback: float) -> float:
    return fallback if value is None else value
