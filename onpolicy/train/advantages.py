"""From the rewards of a group of samples to one advantage per sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, stdev

STD_EPSILON = 1e-6


def grpo(rewards: Sequence[float], normalize_std: bool = True) -> list[float]:
    """(r - mean) / (std + 1e-6), std with n - 1 (DeepSeekMath, arXiv 2402.03300, eq. 4).

    Without the division: Dr. GRPO (arXiv 2503.20783). Needs 2 rewards or more.
    """
    mean = fmean(rewards)
    scale = stdev(rewards) + STD_EPSILON if normalize_std else 1.0
    return [(r - mean) / scale for r in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """r minus the mean of the group's other rewards (arXiv 2402.14740). Needs 2 or more."""
    total, n = sum(rewards), len(rewards)
    return [r - (total - r) / (n - 1) for r in rewards]


def reinforce(rewards: Sequence[float]) -> list[float]:
    """The reward itself."""
    return list(rewards)


def estimator(name: str, normalize_std: bool) -> Callable[[Sequence[float]], list[float]]:
    """The function that `--advantage-estimator` names."""
    if name == "grpo":
        return lambda rewards: grpo(rewards, normalize_std)
    return {"rloo": rloo, "reinforce": reinforce}[name]


def carries_signal(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards are not all equal."""
    return len(set(rewards)) > 1
