"""The curves that a run of the study leaves, and the numbers that judge them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from curves import REWARD, Curves, Summary, named_curves, read_rollouts, short, summarise

WINDOW = 20
"""Rollouts over which a reward is averaged before it is compared with another."""

EXACT = "rollout/reward/exact"
"""The reward of a run whose rewards are advantages."""

CURVES = {
    "reward": REWARD,
    "k3": "train/k3_kl",
    "gradient_norm": "train/grad_norm",
    "entropy": "train/entropy",
    "ess": "mismatch/ess",
    "truncated": "rollout/truncated_ratio",
    "length": "rollout/response_length",
    "lambda": "dc/lambda",
    "weight_mean": "correction/weight_mean",
    "weight_mean_before": "correction/weight_mean_before",
    "rejected": "correction/rejected_fraction",
    "k3_without_replay": "routing/k3_without_replay",
}
"""{name in a record: metric of the run}"""


def read_curves(path: Path) -> Curves:
    """The curves of a record, or of a run's directory; those that its arm does not have are left out."""
    if path.is_file():
        return json.loads(path.read_text())["curves"]
    steps = read_rollouts(path)
    named = CURVES | ({"reward": EXACT} if EXACT in steps[0] else {})
    curves = named_curves(steps, named)
    # Half of every batch is unsolvable and has the reward 0.
    return {**curves, "reward": [short(2 * value) for value in curves["reward"]]}


def summary(curves: Curves) -> Summary:
    """The reward at the end and at its peak, whether the run collapsed, and what led there."""
    return summarise(curves, WINDOW)
