"""Miles and slime: `compute_mis_weights_with_cp` is the function for their
`--custom-tis-function-path`.

`keys` translates their keys into our records, `hook` is the function that they call, `metrics` computes
its metrics, and `context` knows which tokens a context-parallel rank holds.
"""

from fallback_correction.adapters.miles.context import Shard, zigzag_shard
from fallback_correction.adapters.miles.hook import (
    compute_mis_weights,
    compute_mis_weights_with_cp,
)
from fallback_correction.adapters.miles.keys import correction_config

__all__ = [
    "Shard",
    "compute_mis_weights",
    "compute_mis_weights_with_cp",
    "correction_config",
    "zigzag_shard",
]
