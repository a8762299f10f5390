"""The records that say what a correction does, each with its defaults, bounds and explanations.

They import no torch, so that a command line can be made of them without it. `CorrectionSettings` is
importance sampling and rejection as a user asks for them; its `correction()` is the `CorrectionConfig`
that is applied. Keys of other stacks are translated into these records by `adapters`.
"""

from fallback_correction.config.correction import (
    Aggregation,
    CorrectionConfig,
    Level,
    Mode,
    RejectionRule,
    Statistic,
    Veto,
    WeightLevel,
)
from fallback_correction.config.discrepancy import DiscrepancyConfig
from fallback_correction.config.governor import GovernorConfig
from fallback_correction.config.length_decay import LengthDecayConfig, SurgeDetectorConfig
from fallback_correction.config.settings import CorrectionSettings

__all__ = [
    "Aggregation",
    "CorrectionConfig",
    "CorrectionSettings",
    "DiscrepancyConfig",
    "GovernorConfig",
    "LengthDecayConfig",
    "Level",
    "Mode",
    "RejectionRule",
    "Statistic",
    "SurgeDetectorConfig",
    "Veto",
    "WeightLevel",
]
