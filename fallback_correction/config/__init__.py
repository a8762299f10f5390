"""The settings of corrections, each with its defaults, bounds and explanations.

They import no torch, so that a command line can be built from them without it. `CorrectionSettings`
holds importance sampling and rejection as a user sets them; its `correction()` returns the
`CorrectionConfig` that is applied. `adapters` translates the keys of other frameworks into these
records.
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
