"""verl: `compute_rollout_correction` on plain tensors, and its named presets.

`presets` has verl's keys and their named values, `thresholds` parses verl's bounds, which are strings,
`hook` is the function itself, and `metrics` computes its metrics.
"""

from fallback_correction.adapters.verl.hook import compute_rollout_correction
from fallback_correction.adapters.verl.presets import PRESETS, RolloutCorrectionConfig

__all__ = ["PRESETS", "RolloutCorrectionConfig", "compute_rollout_correction"]
