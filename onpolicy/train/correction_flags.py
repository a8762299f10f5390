"""From a run's flags to what `fallback_correction` and the loss take."""

from __future__ import annotations

from types import SimpleNamespace

from fallback_correction.config import CorrectionConfig
from fallback_correction.discrepancy import DiscrepancyPenalty
from onpolicy.algorithm.objectives import ObjectiveConfig
from onpolicy.config import TrainConfig
from onpolicy.config.flags import flag_values
from onpolicy.config.groups import FallbackConfig
from onpolicy.system.user_functions import load_function
from onpolicy.train.batch import CustomCorrection
from onpolicy.train.loss import LossSettings
from onpolicy.train.miles_hook import miles_correction


def weight_correction(flags: FallbackConfig) -> CorrectionConfig | None:
    """Importance weights and rejection as the flags have them; None if a function of the user's own
    takes their place or nothing, or the penalty alone, is asked for."""
    replaced = "custom_tis_function_path" in flags.corrections
    return flags.correction() if {*flags.corrections} - {"dc_mode"} and not replaced else None


def make_penalty(flags: FallbackConfig) -> DiscrepancyPenalty | None:
    """The discrepancy-constrained advantage, if it is asked for."""
    return DiscrepancyPenalty(flags.dc) if flags.dc.mode else None


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
    args = SimpleNamespace(**config.to_dict() | flag_values(flags))
    return miles_correction(function, args, bypass=flags.use_rollout_logprobs)
