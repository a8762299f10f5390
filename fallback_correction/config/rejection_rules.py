"""Rejection by several metrics at once, each with verl's name and its own bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fallback_correction.config.correction import Aggregation, RejectionRule, Statistic
from fallback_correction.ranges import FieldError

METRICS: dict[str, tuple[Statistic, Aggregation]] = {
    "token_k1": ("k1", "token"), "token_k2": ("k2", "token"), "token_k3": ("k3", "token"),
    "seq_sum_k1": ("k1", "sum"), "seq_sum_k2": ("k2", "sum"), "seq_sum_k3": ("k3", "sum"),
    "seq_mean_k1": ("k1", "mean"), "seq_mean_k2": ("k2", "mean"), "seq_mean_k3": ("k3", "mean"),
    "seq_max_k2": ("k2", "max"), "seq_max_k3": ("k3", "max"),
}  # fmt: skip
"""Statistics of tokens or sequences, by their names in verl's `rollout_rs`."""

EXAMPLE = "Write NAME=UPPER or NAME=LOWER_UPPER, as in token_k1=0.5_2 or seq_mean_k3=0.01."


def rejection_rules(field: str, texts: Sequence[str]) -> tuple[RejectionRule, ...]:
    """Parse rules such as `seq_mean_k3=0.01` and `token_k1=0.5_2`.

    Bounds of k1 apply to rho = pi_train / pi_rollout (verl's apply to 1 / rho); a single number is the
    upper bound, and 1 / upper the lower. k2 and k3 have only an upper bound. Raises FieldError for a
    text that is no rule, or that repeats a metric.
    """
    names = [text.partition("=")[0] for text in texts]
    for name in names:
        if names.count(name) > 1:
            raise FieldError(field, " ".join(texts), f"{name} is there twice. Give it once.")
    return tuple(_rule(field, text) for text in texts)


def _rule(field: str, text: str) -> RejectionRule:
    name, _, bounds = text.partition("=")
    if name not in METRICS:
        raise FieldError(field, text, f"no such metric. Use one of {', '.join(METRICS)}. {EXAMPLE}")
    statistic, aggregation = METRICS[name]
    try:
        numbers = [float(part) for part in bounds.split("_")]
    except ValueError:
        numbers = []
    most = 2 if statistic == "k1" else 1
    if not 1 <= len(numbers) <= most or not all(0 < x < math.inf for x in numbers):
        what = "one positive number" if most == 1 else "one or two positive numbers"
        raise FieldError(field, text, f"{name} has {what} for bounds. {EXAMPLE}")
    *low, upper = numbers
    lower = low[0] if low else 1 / upper if statistic == "k1" else -math.inf
    if lower > upper:
        raise FieldError(
            field, text, f"the lower bound {lower:g} is above the upper one. {EXAMPLE}"
        )
    return RejectionRule(statistic=statistic, aggregation=aggregation, lower=lower, upper=upper)
