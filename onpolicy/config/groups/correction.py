"""The flags of corrections, for a rollout whose engine is not aligned with the trainer."""

from dataclasses import dataclass, field
from typing import Annotated

from fallback_correction.config import CorrectionSettings, DiscrepancyConfig, GovernorConfig
from fallback_correction.ranges import ReadBy
from onpolicy.config.flags import Prefix, also
from onpolicy.config.rules import NO_RESULT, Against, Facts, Together

NOTHING_TO_CORRECT = Against(
    lambda run: run.plan.is_always_on_policy,
    "with --true-on-policy-mode the ratio is exactly 1 and there is nothing to correct",
    "Leave it out, or add --parity-policy fallback to have it at hand for a mismatch.",
)
NO_BYPASS = "Leave --use-rollout-logprobs out: then they are computed before the loss."


def _weighs(run: Facts) -> bool:
    return run.use_tis and not run.custom_tis_function_path


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
        "--rs-statistic": run.rs_statistic != "ratio",
        "--rs-lower-bound": run.rs_lower_bound is not None,
        "--rs-upper-bound": run.rs_upper_bound is not None,
    }
    return next((name for name, is_given in given.items() if is_given), None)


IN_A_RUN: dict[str, list[object]] = {
    "use_tis": [
        NOTHING_TO_CORRECT,
        Against(lambda run: run.use_rollout_logprobs and _weighs(run) and run.policy_loss != "reinforce",
            "with --use-rollout-logprobs the ratio of --policy-loss {run.policy_loss} is "
            "pi / pi_rollout, and weights would count it twice",
            "Leave --use-tis out (--use-rs may stay), or use --policy-loss reinforce, which has no "
            "ratio."),
    ],
    "use_rs": [NOTHING_TO_CORRECT],
    "rs_veto_threshold": [NOTHING_TO_CORRECT],
    "m2po_threshold": [
        NOTHING_TO_CORRECT,
        Against(lambda run: run.use_rollout_logprobs and not run.custom_tis_function_path,
            "with --use-rollout-logprobs tokens are rejected micro-batch by micro-batch, before those "
            "of the global batch are known", NO_BYPASS),
    ],
    "rs_rules": [
        Against(_other_rejection,
            "it says all that is rejected by, and {found} would do nothing"),
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
        Against(lambda run: run.rs_statistic != "ratio",
            "--rs-statistic {run.rs_statistic} grows on both sides of a ratio of 1, and has an upper "
            "bound only", "Leave it out."),
    ],
    "rs_statistic": [
        Together(lambda run: run.rs_statistic != "ratio" and run.rs_upper_bound is None
            and (run.use_rs or run.plan.is_governed),
            "--rs-upper-bound=None: --rs-statistic {run.rs_statistic} needs it, since bounds of a "
            "ratio do not bound a divergence. Give one; verl's is 0.01 for the mean k3 of a "
            "sequence."),
    ],
    "tis_batch_normalize": [
        Against(lambda run: run.use_rollout_logprobs and _weighs(run),
            "with --use-rollout-logprobs weights come from the loss's own log-probabilities, "
            "micro-batch by micro-batch, before their mean over the global batch is known", NO_BYPASS),
    ],
    "rejected_in_denominator": [
        Against(lambda run: run.use_rollout_logprobs and not run.custom_tis_function_path,
            "with --use-rollout-logprobs tokens are rejected micro-batch by micro-batch, before it is "
            "known how many of the global batch are left", NO_BYPASS),
    ],
    "tis_nonfinite": [
        ReadBy("a run without --true-on-policy-mode",
            lambda run: run.use_tis or run.plan.corrections or not run.plan.starts_aligned),
    ],
}  # fmt: skip
"""What a run has to say of settings that it shares with whoever else uses `fallback_correction`."""


@also(**IN_A_RUN)
@dataclass(frozen=True, kw_only=True)
class FallbackConfig(CorrectionSettings):
    """The corrections of a rollout: importance sampling, rejection, and others."""

    rejected_in_kl: Annotated[
        bool, ReadBy("--use-kl-loss", lambda run: run.use_kl_loss),
        Against(lambda run: not run.rejected_in_denominator,
            "with --no-rejected-in-denominator rejected tokens are no part of any mean"),
    ] = False  # fmt: skip
    """Let rejected tokens keep their KL penalty."""

    custom_tis_function_path: Annotated[str, NOTHING_TO_CORRECT] = ""
    """Own correction instead: package.module.function or path/to/file.py:function, with the arguments
    that Miles gives it; the flags above are handed to it and do nothing else."""

    use_rollout_logprobs: bool = False
    """Bypass: the rollout's log-probabilities are the old policy's; the trainer computes none before
    the loss. Its ratio corrects the rollout; reinforce has none and needs --use-tis."""

    correct_lag: Annotated[
        bool,
        ReadBy("--rollout-lag, --rollout-segment-tokens or --rollout-schedule free, and no other "
            "correction",
            lambda run: run.plan.may_lag and not (run.plan.corrections or run.use_rollout_logprobs)),
    ] = True  # fmt: skip
    """Where samples may come from earlier weights (--rollout-lag and others) and no other correction is
    asked for, do what --use-rollout-logprobs does if engines are aligned and a rollout has one optimizer
    step, else weigh them as --use-tis does. With --no-correct-lag they are learnt from as they are."""

    use_rollout_routing_replay: Annotated[
        bool,
        Against(lambda run: run.plan.starts_aligned and not run.plan.is_governed,
            "with --true-on-policy-mode both engines choose the same experts"),
    ] = False  # fmt: skip
    """Mixture of experts: train every token with the experts that the rollout chose for it, at gate
    values of the trainer's own router."""

    get_mismatch_metrics: Annotated[bool, NO_RESULT] = False
    """Log mismatch/* and estimator/* even if nothing is corrected."""

    dc: Annotated[DiscrepancyConfig, Prefix("dc_")] = field(default_factory=DiscrepancyConfig.off)

    @property
    def corrections(self) -> tuple[str, ...]:
        """Return the switches of the corrections that these flags turn on; may be empty."""
        switches = {
            "use_tis": self.use_tis,
            "use_rs": self.use_rs,
            "rs_veto_threshold": self.rs_veto_threshold,
            "m2po_threshold": self.m2po_threshold,
            "dc_mode": self.dc.mode,
            "custom_tis_function_path": self.custom_tis_function_path,
        }
        return tuple(name for name, value in switches.items() if value)

    @property
    def is_measured(self) -> bool:
        """Return whether the distance between the engines is measured."""
        return self.get_mismatch_metrics or bool(self.corrections)


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
    """Let the distance between the engines choose the cure, rollout by rollout: stock operators,
    --use-tis, --use-rs too, a smaller learning rate, aligned operators."""

    limits: Annotated[
        GovernorConfig, Prefix("governor_"),
        ReadBy("--mismatch-governor", lambda run: run.mismatch_governor),
    ] = field(default_factory=GovernorConfig)  # fmt: skip
