"""verl: `compute_rollout_correction` on plain tensors, and its named presets.

`thresholds` has verl's keys, their named values, and the parser of verl's bounds, which are strings;
`verl_hook` is the function itself, with its metrics.
"""

from fallback_correction.adapters.verl.thresholds import PRESETS, RolloutCorrectionConfig
from fallback_correction.adapters.verl.verl_hook import compute_rollout_correction

__all__ = ["PRESETS", "RolloutCorrectionConfig", "compute_rollout_correction"]
