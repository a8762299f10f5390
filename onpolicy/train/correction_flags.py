"""From a run's flags to what `fallback_correction` and the loss take."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace

from fallback_correction.adapters.miles import AGGREGATIONS, correction_config
from fallback_correction.config import CorrectionConfig, RejectionRule, Veto
from fallback_correction.discrepancy import DiscrepancyConfig, DiscrepancyPenalty
from onpolicy.algorithm.objectives import ObjectiveConfig
from onpolicy.config import TrainConfig
from onpolicy.config.groups import FallbackConfig
from onpolicy.system.user_functions import load_function
from onpolicy.train.batch import CustomCorrection
from onpolicy.train.loss import LossSettings
from onpolicy.train.miles_hook import miles_correction


def weight_correction(flags: FallbackConfig) -> CorrectionConfig | None:
    """Importance weights and rejection as the flags have them; None if a function of the user's own
    takes their place or nothing is asked for."""
    asked = flags.use_tis or flags.use_rs or flags.rs_veto_threshold is not None
    if not asked or flags.custom_tis_function_path:
        return None
    config = _of_miles_keys(flags)
    if flags.use_rs and flags.rs_statistic != "ratio":
        config = replace(config, rules=(_divergence_rule(flags),))
    if config.veto is not None:
        config = replace(config, veto=Veto(by=flags.rs_veto_by, lower=config.veto.lower))
    return replace(
        config,
        rejected_in_denominator=flags.rejected_in_denominator,
        log_ratio_clamp=flags.tis_log_ratio_clamp,
        nonfinite=flags.tis_nonfinite,
    )


def _of_miles_keys(flags: FallbackConfig) -> CorrectionConfig:
    """What the keys mean in Miles, but that masking bounds below only if asked to, as MIS does
    (arXiv 2602.01826, eq. 6)."""
    keys = replace(flags, use_rs=flags.use_rs and flags.rs_statistic == "ratio")
    if flags.tis_mode == "mask" and flags.tis_lower_bound is None:
        return replace(
            correction_config(replace(keys, tis_mode="truncate")), mode="mask", lower=0.0
        )
    return correction_config(keys)


def _divergence_rule(flags: FallbackConfig) -> RejectionRule:
    assert flags.rs_upper_bound is not None
    return RejectionRule(
        statistic=flags.rs_statistic,
        aggregation=AGGREGATIONS[flags.rs_level],
        upper=flags.rs_upper_bound,
    )


def make_penalty(flags: FallbackConfig) -> DiscrepancyPenalty | None:
    """The discrepancy-constrained advantage, if it is asked for."""
    if not flags.dc_mode:
        return None
    return DiscrepancyPenalty(
        DiscrepancyConfig(
            mode=flags.dc_mode,
            measure=flags.dc_measure,
            lambda0=flags.dc_lambda,
            eta=flags.dc_eta,
            budget=flags.dc_budget,
            lambda_min=flags.dc_lambda_min,
            lambda_max=flags.dc_lambda_max,
            margin=flags.dc_margin,
            average=flags.dc_average,
        )
    )


def loss_settings(config: TrainConfig) -> LossSettings:
    """The loss that the flags ask for."""
    algorithm = config.algorithm
    return LossSettings(
        objective=ObjectiveConfig(
            kind=algorithm.policy_loss,
            eps_clip=algorithm.eps_clip,
            eps_clip_high=config.eps_clip_high,
            eps_clip_c=algorithm.eps_clip_c,
        ),
        kl_loss_coef=algorithm.kl_loss_coef,
        kl_loss_type=algorithm.kl_loss_type,
        use_unbiased_kl=algorithm.use_unbiased_kl,
        rejected_in_kl=config.fallback.rejected_in_kl,
        opsm_delta=algorithm.opsm_delta if algorithm.use_opsm else None,
    )


def custom_correction(config: TrainConfig, flags: FallbackConfig) -> CustomCorrection | None:
    """The user's own, if there is one; it gets all flags of the run, with `flags` in force.

    Raises ConfigError if it cannot be imported, or asks for what nobody gives.
    """
    path = flags.custom_tis_function_path
    if not path:
        return None
    function = load_function(path, "--custom-tis-function-path")
    args = SimpleNamespace(**config.to_dict() | asdict(flags))
    return miles_correction(function, args, bypass=flags.use_rollout_logprobs)
