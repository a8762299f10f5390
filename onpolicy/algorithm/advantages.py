"""Advantages from the rewards of groups of episodes of the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from math import fsum, sqrt
from statistics import mean
from typing import Literal

import torch

from fallback_correction.choices import require_choice
from fallback_correction.tokens import Gather, alone, exact_sum

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
    episodes: list[list[int]] | None = None,
) -> list[list[float]]:
    """One advantage for every trajectory, by groups, in the order of `rewards`.

    - grpo: (r - mean) / (std + 1e-6) within the group, std with n - 1 (arXiv 2402.03300);
    - dr_grpo: r - mean (arXiv 2503.20783);
    - rloo: r - mean of the others (arXiv 2402.14740);
    - reinforce: r;
    - reinforce_plus_plus: r, whitened over the tokens of the batch (arXiv 2501.03262);
    - reinforce_plus_plus_baseline: r - mean of the group, whitened in the same way.

    episodes: the number of the episode that each is a trajectory of, those of one side by side; None:
    each is one of its own. Mean, std, n and the others are of episodes, each of which counts once,
    however often it branched; its reward is the mean of its trajectories', and r is a trajectory's own.
    So where an episode has one reward for all, all have its advantage, as in slime
    (`slime/utils/ppo_utils.py`, `group_relative_advantages`). Where trajectories have rewards of their
    own, the baseline alone is of episodes. verl knows none: there every row of a prompt is a sample.

    lengths: tokens of every trajectory that are trained on; the last two need them, since every token
    carries its trajectory's value. A group whose episodes' rewards are all equal has no signal, and
    advantages of exactly 0 under grpo, dr_grpo and rloo. ValueError for another estimator, and for
    missing lengths.
    """
    require_choice("estimator", estimator, AdvantageEstimator)
    advantages = [
        _group_advantages(group, estimator, range(len(group)) if episodes is None else episodes[i])
        for i, group in enumerate(rewards)
    ]
    if estimator.startswith("reinforce_plus_plus"):
        values = [a for group in advantages for a in group]
        pairs = zip(_require_lengths(rewards, lengths), values, strict=True)
        whitened = whitening([[pair] for pair in pairs])
        advantages = [[whitened(a) for a in group] for group in advantages]
    return advantages


def _group_advantages(
    rewards: Sequence[float], estimator: AdvantageEstimator, episodes: Sequence[int]
) -> list[float]:
    """Those of a group before whitening."""
    if estimator in ("reinforce", "reinforce_plus_plus"):
        return [*rewards]
    pairs = groupby(zip(episodes, rewards, strict=True), key=lambda pair: pair[0])
    parts = [[reward for _, reward in part] for _, part in pairs]
    of_episodes = torch.tensor([mean(part) for part in parts], dtype=torch.float64)
    if (of_episodes == of_episodes[:1]).all():
        return [0.0] * len(rewards)
    each, counts = torch.tensor(rewards, dtype=torch.float64), [len(part) for part in parts]
    centered = each - of_episodes.mean()
    if estimator == "grpo":
        centered = centered / (of_episodes.std() + EPSILON)
    elif estimator == "rloo":
        episodes_own = of_episodes.repeat_interleave(torch.tensor(counts))
        left_out = (episodes_own - of_episodes.mean()) * (len(parts) / max(len(parts) - 1, 1))
        centered = left_out + (each - episodes_own)
    advantages: list[float] = centered.tolist()
    return advantages


def returns(token_rewards: Sequence[float]) -> list[float]:
    """[R]: of every token the rewards from it on, added up in float64 from the last to it."""
    return [*accumulate(reversed(token_rewards))][::-1]


def _require_lengths(rewards: list[list[float]], lengths: list[list[int]] | None) -> list[int]:
    """The length of every trajectory, in one list."""
    if lengths is None or [len(group) for group in lengths] != [len(group) for group in rewards]:
        raise ValueError(
            f"lengths={lengths}: REINFORCE++ whitens over tokens. Give the length of every response, "
            "in groups like those of the rewards."
        )
    return [length for group in lengths for length in group]


def whitening(
    trajectories: Sequence[Sequence[tuple[int, float]]], gather: Gather = alone
) -> Callable[[float], float]:
    """verl's masked_whiten (verl/utils/torch_functional.py) of a token's value a, n tokens having it:

    (a - m) / sqrt(v + 1e-8), m = sum n a / N, v = sum n (a - m)^2 / (N - 1), N = sum n.

    trajectories: the pairs (n, a) of each that this rank has. Sums of a trajectory are rounded, and
    their sum is rounded once, so that no bit depends on the ranks.
    """

    def total(of: Callable[[int, float], float]) -> float:
        sums = [fsum(of(n, a) for n, a in pairs) for pairs in trajectories]
        return exact_sum(gather(torch.tensor(sums, dtype=torch.float64)))

    values = [a for pairs in trajectories for _, a in pairs]
    ends = [min(values), max(values)] if values else []
    everyones = gather(torch.tensor(ends, dtype=torch.float64))
    num_tokens = total(lambda n, a: n)
    if num_tokens < 2 or (everyones == everyones[:1]).all():
        return lambda a: 0.0
    mean = total(lambda n, a: n * a) / num_tokens
    squares = total(lambda n, a: n * (a - mean) ** 2)
    scale = sqrt(squares / (num_tokens - 1) + WHITENING_EPSILON)
    return lambda a: (a - mean) / scale
