"""verl: `compute_rollout_correction` on plain tensors, and its named presets."""

from fallback_correction.adapters.verl.hook import compute_rollout_correction
from fallback_correction.adapters.verl.presets import PRESETS, RolloutCorrectionConfig

__all__ = ["PRESETS", "RolloutCorrectionConfig", "compute_rollout_correction"]
