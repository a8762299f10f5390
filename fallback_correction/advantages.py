"""Advantages from the rewards of groups of samples of the same prompt."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

AdvantageEstimator = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
]

EPSILON = 1e-6


def group_advantages(
    rewards: list[list[float]], estimator: AdvantageEstimator
) -> list[list[float]]:
    """One advantage for every sample, by groups, in the order of `rewards`.

    - grpo: (r - mean) / (std + 1e-6) within the group, std with n - 1 (arXiv 2402.03300);
    - dr_grpo: r - mean (arXiv 2503.20783);
    - rloo: r - mean of the others (arXiv 2402.14740);
    - reinforce: r;
    - reinforce_plus_plus: r, whitened over the batch (arXiv 2501.03262);
    - reinforce_plus_plus_baseline: r - mean of the group, whitened over the batch.

    A group whose rewards are all equal has advantages of exactly 0 under grpo, dr_grpo and rloo.
    """
    groups = [torch.tensor(group, dtype=torch.float64) for group in rewards]
    if estimator == "grpo":
        advantages = [_standardized(group) for group in groups]
    elif estimator in ("dr_grpo", "reinforce_plus_plus_baseline"):
        advantages = [_centered(group) for group in groups]
    elif estimator == "rloo":
        advantages = [_centered(group) * (len(group) / max(len(group) - 1, 1)) for group in groups]
    else:
        advantages = groups
    if estimator.startswith("reinforce_plus_plus"):
        advantages = _whitened(advantages)
    return [group.tolist() for group in advantages]


def _centered(group: Tensor) -> Tensor:
    if (group == group[:1]).all():
        return torch.zeros_like(group)
    return group - group.mean()


def _standardized(group: Tensor) -> Tensor:
    centered = _centered(group)
    return centered / (group.std() + EPSILON) if len(group) > 1 else centered


def _whitened(groups: list[Tensor]) -> list[Tensor]:
    """(a - mean) / (std + 1e-6) over all groups together."""
    if not groups:
        return []
    every = torch.cat(groups)
    std = every.std() if len(every) > 1 else every.new_zeros(())
    return [(group - every.mean()) / (std + EPSILON) for group in groups]
