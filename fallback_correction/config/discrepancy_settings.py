"""Settings of the discrepancy penalty of arXiv 2606.08779 (DC-GRPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fallback_correction.ranges import (
    FieldError,
    NotAbove,
    ReadBy,
    at_least,
    require_choices,
    require_ranges,
)

Measure = Literal["difference", "ratio", "log"]
Average = Literal["trajectory", "token"]
PENALTY = ReadBy("{mode}", lambda it: it.mode)
LAGRANGIAN = ReadBy("{mode} lagrangian", lambda it: it.mode == "lagrangian")
MEAN = ReadBy("{mode} lagrangian, or {centered}", lambda it: it.mode == "lagrangian" or it.centered)
NonNegative = Annotated[float, at_least(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscrepancyConfig:
    """Settings of a penalty of lambda times the discrepancy delta on every token. The defaults are the
    paper's for Qwen3-8B; see also `moe`.

    delta needs pi_train of the behavior policy. In bypass mode it is not recomputed: refuse that mode,
    or take the current policy's at the first optimizer step, where they are the same. At a later step
    delta would measure the update instead of the engines.
    """

    mode: Literal["", "fixed", "lagrangian"] = "lagrangian"
    """Subtract lambda times the mismatch between the engines from every token's advantage (DC-GRPO,
    arXiv 2606.08779). `fixed`: lambda is constant (eq. 4). `lagrangian`: lambda
    changes after every rollout (eq. 8 and 11)."""

    measure: Annotated[Measure, PENALTY] = "difference"
    """Measure of the mismatch: |pi_train - pi_rollout|, |rho - 1|, or |log rho| (eq. 2)."""

    lambda_: Annotated[NonNegative, PENALTY] = 0.1
    """First lambda, in advantage per unit of mismatch. The paper uses 0.05 for mixtures of experts."""

    eta: Annotated[NonNegative, LAGRANGIAN] = 1.0
    """lagrangian: step size of lambda."""

    budget: Annotated[NonNegative, LAGRANGIAN] = 0.0037
    """lagrangian: mean mismatch that is allowed, for the measure `difference`. The paper uses 0.0050 for
    mixtures of experts."""

    lambda_min: Annotated[NonNegative, NotAbove("lambda_max"), LAGRANGIAN] = 0.0
    """lagrangian: smallest lambda."""

    lambda_max: Annotated[NonNegative, LAGRANGIAN] = 1.0
    """lagrangian: largest lambda. The paper bounds lambda without giving the numbers."""

    average: Annotated[Average, MEAN] = "trajectory"
    """lagrangian, or centered: mean over trajectories of their means (eq. 11), or over all tokens."""

    centered: Annotated[bool, PENALTY] = False
    """Subtract the mean penalty of a rollout from every penalty, so that the advantages keep their mean.
    The paper does not: where all rewards of a group are equal, its advantages all become negative."""

    @staticmethod
    def off() -> DiscrepancyConfig:
        """Return settings without a penalty."""
        return DiscrepancyConfig(mode="")

    @staticmethod
    def moe() -> DiscrepancyConfig:
        """Return the paper's settings for Qwen3-30B-A3B, a mixture of experts."""
        return DiscrepancyConfig(lambda_=0.05, budget=0.0050)

    def __post_init__(self) -> None:
        require_choices(self)
        require_ranges(self)
        if self.mode == "lagrangian" and not self.lambda_min <= self.lambda_ <= self.lambda_max:
            rule = f"must lie in [{self.lambda_min}, {self.lambda_max}]"
            raise FieldError("lambda_", self.lambda_, f"{rule}. Change it or leave it out.")
