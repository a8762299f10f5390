"""A run's metrics as curves: a value a rollout."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

REWARD = "rollout/raw_reward"
"""What every rollout's record has, and that of an evaluation has not."""


def read_rollouts(directory: Path) -> list[dict[str, Any]]:
    """The records of a run's rollouts, as they stand in its metrics.jsonl."""
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if REWARD in record]


def short(value: float) -> float:
    """Five digits."""
    return float(f"{value:.5g}")


def windows(values: list[float], length: int) -> list[float]:
    """Means of `length` consecutive values, each; of all there are, if they are fewer."""
    count = max(len(values) - length, 0) + 1
    return [fmean(values[i : i + length]) for i in range(count)]


def smooth(values: list[float], length: int) -> list[float]:
    """Means over the last `length` values, each point's own included."""
    parts = [values[max(0, i + 1 - length) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]
