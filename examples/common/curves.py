"""A run's metrics as curves: a value a rollout."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

REWARD = "rollout/raw_reward"
"""A metric that every rollout's record has, and no evaluation's."""

Curves = dict[str, list[float]]
Summary = dict[str, Any]


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The records of a run's rollouts and evaluations, as they stand in its metrics.jsonl."""
    return [*map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())]


def read_run_hash(directory: Path) -> str:
    """The hash of a run that has ended, from the end of its log."""
    return re.findall(r"run hash (\w{32})", (directory / "logs" / "train.log").read_text())[-1]


def read_rollouts(directory: Path) -> list[dict[str, Any]]:
    """The records of a run's rollouts alone."""
    return [record for record in read_metrics(directory) if REWARD in record]


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


def named_curves(rollouts: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Curves:
    """The curves of {name: metric}; those of metrics that some rollout does not have are left out."""
    found = {name: key for name, key in names.items() if all(key in each for each in rollouts)}
    return {name: [short(each[key]) for each in rollouts] for name, key in found.items()}


def summarise(curves: Curves, window: int) -> Summary:
    """The reward at the end and at its peak over `window` rollouts, and whether the run collapsed.

    It has if it ends below half of its peak. k3 and the gradient norm say what led there; k3 is None
    in a run whose samples lag, of which no token is compared.
    """
    rewards = windows(curves["reward"], window)
    k3 = windows(curves["k3"], window) if "k3" in curves else [None]
    last, peak = rewards[-1], max(rewards)
    return {
        "reward": last,
        "peak": peak,
        "collapsed": last < peak / 2,
        "k3_first": k3[0],
        "k3_last": k3[-1],
        "largest_gradient_norm": max(curves["gradient_norm"]),
    }


def draw(axis: Any, seeds: list[list[float]], label: str, color: str, length: int) -> None:
    """Draws the smoothed curves of a case's seeds, and their mean where there are several."""
    curves = [smooth(values, length) for values in seeds]
    for curve in curves if len(curves) > 1 else []:
        axis.plot(curve, color=color, alpha=0.35, linewidth=0.8)
    axis.plot([fmean(each) for each in zip(*curves, strict=True)], color=color, label=label)
