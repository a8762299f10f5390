"""What tokens must have in common to be computed once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def token_labels(
    tokens: Sequence[int], routed_experts: NDArray[np.integer] | None
) -> list[tuple[int, bytes]]:
    """The token and the experts that it is to take, if they are given: [T], [T - 1, ...] or None.

    Two tokens after the same labels are one row of a model's pass if they have the same label.
    """
    known = [] if routed_experts is None else [row.tobytes() for row in routed_experts]
    return [*zip(tokens, known, strict=False), *((t, b"") for t in tokens[len(known) :])]
