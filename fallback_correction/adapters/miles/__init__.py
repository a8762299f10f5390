"""Miles and slime: `compute_mis_weights_with_cp` is what `--custom-tis-function-path` names there."""

from fallback_correction.adapters.miles.context import Shard, zigzag_shard
from fallback_correction.adapters.miles.hook import (
    AGGREGATIONS,
    compute_mis_weights,
    compute_mis_weights_with_cp,
    correction_config,
)

__all__ = [
    "AGGREGATIONS",
    "Shard",
    "compute_mis_weights",
    "compute_mis_weights_with_cp",
    "correction_config",
    "zigzag_shard",
]
