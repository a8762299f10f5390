"""What a run is, resolved once from its flags, under names that no flag has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onpolicy.config import groups
from onpolicy.config.flags import flag_values

OnMismatch = Literal["fail", "fall back", "warn", "measure"]
"""What a token with another log-probability in training leads to: the run ends, the rollout is
corrected, the log says so, or the metrics do."""

_CORRECTIONS = ("use_tis", "use_rs", "rs_veto_threshold", "dc_mode", "custom_tis_function_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What a run is; `TrainConfig.plan`."""

    starts_aligned: bool
    """Whether the first rollout runs on aligned operators."""

    may_align: bool
    """Whether a rollout may run on aligned operators: the first, or one after the governor."""

    is_governed: bool
    """Whether the distance between the engines chooses operators and corrections, rollout by rollout."""

    may_lag: bool
    """Whether tokens may come from earlier weights than those that learn from them."""

    corrections: tuple[str, ...]
    """The corrections that the flags ask for, by their switches."""

    weighs_lag: bool
    """Whether samples of earlier weights are weighed where nothing else is done about them."""

    on_aligned_mismatch: OnMismatch
    on_stock_mismatch: OnMismatch

    is_rank_invariant: bool
    """Whether the bits of a step are to be the same on any number of trainer ranks."""

    @property
    def is_always_on_policy(self) -> bool:
        """Whether every rollout runs on aligned operators and the newest weights, uncorrected."""
        falls_back = self.on_aligned_mismatch == "fall back"
        return self.starts_aligned and not (self.is_governed or falls_back or self.may_lag)

    def on_mismatch(self, *, is_aligned: bool) -> OnMismatch:
        """What a mismatched token leads to under a contract that is aligned, or is not."""
        return self.on_aligned_mismatch if is_aligned else self.on_stock_mismatch


def plan_of(
    parity: groups.ParityConfig,
    governor: groups.GovernorFlags,
    rollout: groups.RolloutConfig,
    fallback: groups.FallbackConfig,
    trainer: groups.TrainerConfig,
) -> RunPlan:
    """The plan of a run with these flags, whether or not they keep all rules."""
    aligned, asked = parity.true_on_policy_mode, parity.parity_policy
    governed = governor.mismatch_governor
    may_align = aligned or (governed and governor.limits.highest == "aligned")
    lags = rollout.rollout_lag or rollout.rollout_segment_tokens
    may_lag = bool(lags) or rollout.rollout_schedule == "free"
    policies: dict[str | None, OnMismatch] = {
        "fail": "fail",
        "warn": "warn",
        "fallback": "fall back",
        None: "fail" if may_align else "warn",
    }
    return RunPlan(
        starts_aligned=aligned,
        may_align=may_align,
        is_governed=governed,
        may_lag=may_lag,
        corrections=corrections_in(flag_values(fallback)),
        weighs_lag=may_lag and fallback.correct_lag,
        on_aligned_mismatch=policies[asked],
        on_stock_mismatch="fail" if asked == "fail" else "measure",
        is_rank_invariant=trainer.rank_invariant or may_align,
    )


def corrections_in(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The switches of corrections that are on among the values of flags."""
    return tuple(name for name in _CORRECTIONS if values[name])
