"""The flags of corrections, for a rollout whose engine is not aligned with the trainer."""

from dataclasses import dataclass, field
from typing import Annotated

from fallback_correction.config import CorrectionSettings, DiscrepancyConfig, GovernorConfig
from fallback_correction.ranges import ReadBy
from onpolicy.algorithm.catalogue import OBJECTIVES
from onpolicy.config.flags import Prefix, also, no_flags
from onpolicy.config.rules import NO_RESULT, Against, Facts, Together

NOTHING_TO_CORRECT = Against(
    lambda run: run.plan.is_always_on_policy,
    "with --true-on-policy-mode the ratio is exactly 1 and there is nothing to correct",
    "Leave it out, or add --parity-policy fallback to have it at hand for a mismatch.",
)
NO_BYPASS = "Leave --use-rollout-logprobs out: then they are computed before the loss."
BEFORE_THE_BATCH = Against(
    lambda run: run.use_rollout_logprobs and not run.custom_tis_function_path,
    "with --use-rollout-logprobs tokens are weighed and rejected by the loss's own log-probabilities, "
    "one micro-batch at a time, before the global batch is known",
    NO_BYPASS,
)


def _crossed_weights(run: Facts) -> str | None:
    """Return the lower bound of weights, if it is above the upper one and there may be weights."""
    may_weigh = run.use_tis or run.plan.is_governed or run.plan.may_lag
    low, high = run.config.fallback.weight_bounds
    crossed = may_weigh and not run.custom_tis_function_path and low > high
    return f"{low:g}" if crossed else None


def _crossed_rejection(run: Facts) -> str | None:
    """Return the bounds of rejection, if they are in the wrong order and something may be rejected."""
    may_reject = (run.use_rs or run.plan.is_governed) and not run.rs_rules
    low, high = run.config.fallback.rejection_bounds
    crossed = may_reject and not run.custom_tis_function_path and low > high
    return f"{low:g} to {high:g}" if crossed else None


def _other_rejection(run: Facts) -> str | None:
    """Return the first given flag of the single metric that --rs-rules replaces, if any."""
    given = {
        "--rs-level": run.rs_level != "token",
        "--rs-lower-bound": run.rs_lower_bound is not None,
        "--rs-upper-bound": run.rs_upper_bound is not None,
    }
    return next((name for name, is_given in given.items() if is_given), None)


IN_A_RUN: dict[str, list[object]] = {
    "use_tis": [
        NOTHING_TO_CORRECT,
        Against(lambda run: run.use_rollout_logprobs and run.use_tis
            and not run.custom_tis_function_path and OBJECTIVES[run.policy_loss].ratio != "none",
            "with --use-rollout-logprobs the ratio of --policy-loss {run.policy_loss} is "
            "pi / pi_rollout, and weights would count it twice",
            "Leave --use-tis out (--use-rs may stay), or use --policy-loss reinforce, which has no "
            "ratio."),
    ],
    "use_rs": [NOTHING_TO_CORRECT],
    "rs_veto_threshold": [NOTHING_TO_CORRECT],
    "rs_rules": [
        Against(_other_rejection,
            "it says all that is rejected by, and {found} would do nothing"),
        Against(lambda run: run.config.fallback.may_bound_kl and run.advantage_estimator == "otb",
            "seq_max_kl and --advantage-estimator otb each take their own numbers from the forward pass "
            "before the loss, which returns those of one"),
        Against(lambda run: run.config.fallback.may_bound_kl and run.train_backend == "megatron"
            and run.megatron_pp > 1,
            "with --megatron-pp={run.megatron_pp} only the last stage knows the distributions that "
            "seq_max_kl compares",
            "Leave --megatron-pp at 1, or use seq_max_k3."),
        Against(lambda run: run.config.fallback.may_bound_kl and not run.plan.starts_aligned
            and (run.rollout_top_p, run.rollout_top_k, run.rollout_min_p) != (1, -1, 0),
            "seq_max_kl needs the policy that tokens are drawn from, and with --rollout-top-p, "
            "--rollout-top-k or --rollout-min-p an engine without --true-on-policy-mode returns another",
            "Leave these out, align the engines, or use seq_max_k3."),
    ],
    "dc_mode": [
        NOTHING_TO_CORRECT,
        Against(lambda run: run.use_rollout_logprobs,
            "with --use-rollout-logprobs pi_train is not known before the loss, and advantages are "
            "made there", NO_BYPASS),
    ],
    "tis_upper_bound": [
        ReadBy("--use-tis, --use-rs, --dc-mode or --get-mismatch-metrics",
            lambda run: run.use_tis or run.use_rs or run.config.fallback.is_measured),
        Against(_crossed_weights,
            "--tis-mode clip bounds below by 1 / --tis-upper-bound = {found} if nothing else is given",
            "Give --tis-lower-bound."),
    ],
    "rs_lower_bound": [
        Together(_crossed_rejection,
            "--rs-lower-bound={run.rs_lower_bound}: rejection would keep from {found}, by the "
            "weights' bounds where none is given. Give --rs-lower-bound and --rs-upper-bound."),
    ],
    "tis_batch_normalize": [BEFORE_THE_BATCH],
    "rejected_in_denominator": [BEFORE_THE_BATCH],
    "tis_nonfinite": [
        ReadBy("a run without --true-on-policy-mode",
            lambda run: run.use_tis or run.plan.corrections or not run.plan.starts_aligned),
    ],
}  # fmt: skip
"""What a run has to say of settings that it shares with whoever else uses `fallback_correction`."""


@no_flags("tis_log_ratio_clamp", "rs_veto_by", "dc_lambda_min", "dc_lambda_max", "dc_average")
@also(**IN_A_RUN)
@dataclass(frozen=True, kw_only=True)
class FallbackConfig(CorrectionSettings):
    """The corrections of a rollout: importance sampling, rejection, and others."""

    custom_tis_function_path: Annotated[str, NOTHING_TO_CORRECT] = ""
    """Your own correction: package.module.function or path/to/file.py:function, called with Miles'
    arguments. It replaces the corrections of the other flags and receives all flags."""

    use_rollout_logprobs: bool = False
    """Bypass: take the rollout's log-probabilities as the old policy's, so that the trainer computes
    none before the loss. The ratio of the objective then corrects the rollout; --policy-loss reinforce
    has no ratio and needs --use-tis."""

    correct_lag: Annotated[
        bool,
        ReadBy("--rollout-lag or --rollout-schedule free, and no other correction",
            lambda run: run.plan.may_lag and not (run.plan.corrections or run.use_rollout_logprobs)),
    ] = True  # fmt: skip
    """Correct stale samples (--rollout-lag, --rollout-schedule free) if no other correction is selected:
    like --use-rollout-logprobs with aligned engines and one optimizer step per rollout, otherwise like
    --use-tis. With --no-correct-lag they are trained on as they are."""

    use_rollout_routing_replay: Annotated[
        bool,
        Against(lambda run: run.plan.starts_aligned and not run.plan.is_governed,
            "with --true-on-policy-mode both engines choose the same experts"),
    ] = False  # fmt: skip
    """Mixture of experts: train each token with the experts that the rollout chose for it. The gate
    values are the trainer's own."""

    get_mismatch_metrics: Annotated[bool, NO_RESULT] = False
    """Log mismatch/* and estimator/* even if no correction is selected."""

    dc: Annotated[DiscrepancyConfig, Prefix("dc_")] = field(default_factory=DiscrepancyConfig.off)

    @property
    def corrections(self) -> tuple[str, ...]:
        """Return the switches of the corrections that these flags turn on; may be empty."""
        switches = {
            "use_tis": self.use_tis,
            "use_rs": self.use_rs,
            "rs_veto_threshold": self.rs_veto_threshold,
            "dc_mode": self.dc.mode,
            "custom_tis_function_path": self.custom_tis_function_path,
        }
        return tuple(name for name, value in switches.items() if value)

    @property
    def may_bound_kl(self) -> bool:
        """Return whether --rs-rules holds a metric of whole distributions."""
        return any(rule.startswith("seq_max_kl=") for rule in self.rs_rules)

    @property
    def is_measured(self) -> bool:
        """Return whether the distance between the engines is measured."""
        return self.get_mismatch_metrics or bool(self.corrections)


@no_flags("governor_ess", "governor_log_ppl_abs_diff", "governor_calm", "governor_lr_scale")
@dataclass(frozen=True, kw_only=True)
class GovernorFlags:
    mismatch_governor: Annotated[
        bool,
        Against(lambda run: run.rollout_server_url,
            "with --rollout-server-url it cannot start servers under another contract"),
        Against(lambda run: run.use_rollout_logprobs,
            "with --use-rollout-logprobs the loss corrects the rollout, on every rung"),
        Against(lambda run: run.rollout_schedule == "free",
            "it starts servers under another contract when they draw nothing, and with "
            "--rollout-schedule free they always draw"),
    ] = False  # fmt: skip
    """Choose the correction from the measured mismatch of each rollout. The steps are: nothing,
    --use-tis, --use-rs as well, a smaller learning rate, aligned operators."""

    limits: Annotated[
        GovernorConfig, Prefix("governor_"),
        ReadBy("--mismatch-governor", lambda run: run.mismatch_governor),
    ] = field(default_factory=GovernorConfig)  # fmt: skip
