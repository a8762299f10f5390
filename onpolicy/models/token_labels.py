"""Labels of tokens, by which shared prefixes are found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def token_labels(
    tokens: Sequence[int], routed_experts: NDArray[np.integer] | None
) -> list[tuple[int, bytes]]:
    """Return a label for each token: its id, and the experts that it is to use, if given.

    tokens: [T]; routed_experts: [T - 1, ...] or None. Two tokens with the same prefix of labels are
    one row of a model's forward pass if they have the same label.
    """
    known = [] if routed_experts is None else [row.tobytes() for row in routed_experts]
    return [*zip(tokens, known, strict=False), *((t, b"") for t in tokens[len(known) :])]
