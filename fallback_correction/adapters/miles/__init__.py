"""Miles and slime: `compute_mis_weights_with_cp` is the function for their
`--custom-tis-function-path`.

`miles_hook` is the function that they call, with its metrics and the translation of their keys into our
records; `context` knows which tokens a context-parallel rank holds.
"""

from fallback_correction.adapters.miles.context import Shard, zigzag_shard
from fallback_correction.adapters.miles.miles_hook import (
    compute_mis_weights,
    compute_mis_weights_with_cp,
    correction_config,
)

__all__ = [
    "Shard",
    "compute_mis_weights",
    "compute_mis_weights_with_cp",
    "correction_config",
    "zigzag_shard",
]
