"""The settings of corrections, each with its defaults, bounds and explanations.

They import no torch, so that a command line can be built from them without it. `CorrectionSettings`
holds importance sampling and rejection as a user sets them; its `correction()` returns the
`CorrectionConfig` that is applied. `adapters` translates the keys of other frameworks into these
records.
"""

from fallback_correction.config.correction_settings import (
    BY_TOKEN,
    Aggregation,
    CorrectionConfig,
    CorrectionSettings,
    Level,
    Mode,
    RejectionRule,
    Statistic,
    Veto,
    WeightLevel,
)
from fallback_correction.config.discrepancy_settings import DiscrepancyConfig
from fallback_correction.config.governor_settings import GovernorConfig
from fallback_correction.config.length_decay_settings import LengthDecayConfig, SurgeDetectorConfig

__all__ = [
    "BY_TOKEN",
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
