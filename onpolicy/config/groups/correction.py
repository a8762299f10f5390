"""What is done about a rollout whose engine is not aligned with the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fallback_correction.config import CorrectionSettings, DiscrepancyConfig, GovernorConfig
from onpolicy.config.flags import Prefix


@dataclass(frozen=True, kw_only=True)
class FallbackConfig(CorrectionSettings):
    """Importance sampling and rejection, and what else corrects a rollout of this trainer's."""

    rejected_in_kl: bool = False
    """Let rejected tokens keep their KL penalty."""

    custom_tis_function_path: str = ""
    """Own correction instead: package.module.function or path/to/file.py:function, with the arguments
    that Miles gives it; the flags above are handed to it and do nothing else."""

    use_rollout_logprobs: bool = False
    """Bypass: the rollout's log-probabilities are the old policy's; the trainer computes none before
    the loss. Its ratio corrects the rollout; reinforce has none and needs --use-tis."""

    correct_lag: bool = True
    """Where samples may come from earlier weights (--rollout-lag and others), weigh them as --use-tis
    does if no other correction is asked for. With --no-correct-lag they are learnt from as they are."""

    use_rollout_routing_replay: bool = False
    """Mixture of experts: train every token with the experts that the rollout chose for it, at gate
    values of the trainer's own router."""

    get_mismatch_metrics: bool = False
    """Log mismatch/* and estimator/* even if nothing is corrected."""

    dc: Annotated[DiscrepancyConfig, Prefix("dc_")] = field(default_factory=DiscrepancyConfig.off)


@dataclass(frozen=True, kw_only=True)
class GovernorFlags:
    mismatch_governor: bool = False
    """Let the distance between the engines choose the cure, rollout by rollout: stock operators,
    --use-tis, --use-rs too, a smaller learning rate, aligned operators."""

    limits: Annotated[GovernorConfig, Prefix("governor_")] = field(default_factory=GovernorConfig)
