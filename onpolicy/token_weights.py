"""What sampled tokens are weighed with in the loss, as episodes and reward functions say it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

TOKEN_WEIGHTS = "token_weights"
"""Their name in what is returned."""


def checked_weights(name: str, values: Any, count: int, of: str) -> list[float]:
    """`values` as weights. Raises ValueError for what `checked_numbers` refuses, and below 0."""
    weights = checked_numbers(name, values, count, of)
    if (least := min(weights, default=0.0)) < 0:
        raise ValueError(f"{name}={least!r}: must be at least 0")
    return weights


def checked_numbers(name: str, values: Any, count: int, of: str) -> list[float]:
    """`values` as numbers. Raises ValueError for what is no list, for a count that is not `of`'s, and
    for what is no finite number."""
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r:.60}: must be a list of numbers")
    listed = [*values]
    if len(listed) != count:
        raise ValueError(f"{name}={len(listed)} numbers: {of} are {count}. Give one for each")
    for value in listed:
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{name}={value!r}: must be a finite number")
    return [float(value) for value in listed]
