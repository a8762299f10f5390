"""Advantages from the rewards of groups of samples of the same prompt."""

from __future__ import annotations

from math import fsum, sqrt
from typing import Literal

import torch
from torch import Tensor

from fallback_correction.choices import require_choice

AdvantageEstimator = Literal[
    "grpo", "dr_grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
]

EPSILON = 1e-6

WHITENING_EPSILON = 1e-8
"""Added to the variance of advantages, as in verl's masked_whiten."""


def group_advantages(
    rewards: list[list[float]],
    estimator: AdvantageEstimator,
    lengths: list[list[int]] | None = None,
) -> list[list[float]]:
    """One advantage for every sample, by groups, in the order of `rewards`.

    - grpo: (r - mean) / (std + 1e-6) within the group, std with n - 1 (arXiv 2402.03300);
    - dr_grpo: r - mean (arXiv 2503.20783);
    - rloo: r - mean of the others (arXiv 2402.14740);
    - reinforce: r;
    - reinforce_plus_plus: r, whitened over the tokens of the batch (arXiv 2501.03262);
    - reinforce_plus_plus_baseline: r - mean of the group, whitened in the same way.

    lengths: tokens of every response that are trained on; the last two need them, since every token
    carries its sample's value. A group whose rewards are all equal has advantages of exactly 0
    under grpo, dr_grpo and rloo. ValueError for another estimator, and for missing lengths.
    """
    require_choice("estimator", estimator, AdvantageEstimator)
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
        advantages = _whitened(advantages, _require_lengths(rewards, lengths))
    return [group.tolist() for group in advantages]


def _centered(group: Tensor) -> Tensor:
    if (group == group[:1]).all():
        return torch.zeros_like(group)
    return group - group.mean()


def _standardized(group: Tensor) -> Tensor:
    centered = _centered(group)
    return centered / (group.std() + EPSILON) if len(group) > 1 else centered


def _require_lengths(rewards: list[list[float]], lengths: list[list[int]] | None) -> list[int]:
    """The length of every sample, in one list."""
    if lengths is None or [len(group) for group in lengths] != [len(group) for group in rewards]:
        raise ValueError(
            f"lengths={lengths}: REINFORCE++ whitens over tokens. Give the length of every response, "
            "in groups like those of the rewards."
        )
    return [length for group in lengths for length in group]


def _whitened(groups: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """verl's masked_whiten (verl/utils/torch_functional.py), n_i tokens having the value a_i:

    (a - m) / sqrt(v + 1e-8), m = sum n a / N, v = sum n (a - m)^2 / (N - 1), N = sum n.
    """
    values = [value for group in groups for value in group.tolist()]
    num_tokens = sum(lengths)
    if num_tokens < 2 or len(set(values)) == 1:
        return [torch.zeros_like(group) for group in groups]
    mean = fsum(n * a for n, a in zip(lengths, values, strict=True)) / num_tokens
    squares = fsum(n * (a - mean) ** 2 for n, a in zip(lengths, values, strict=True))
    scale = sqrt(squares / (num_tokens - 1) + WHITENING_EPSILON)
    return [(group - mean) / scale for group in groups]
