"""Advantages from the rewards of groups of episodes, one group for each prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, groupby
from math import fsum, sqrt
from statistics import mean

import torch
from torch import Tensor

from fallback_correction.choices import require_choice
from fallback_correction.tokens import Gather, alone, exact_sum
from onpolicy.algorithm.registry import ESTIMATORS, AdvantageEstimator, EstimatorEntry

EPSILON = 1e-6

WHITENING_EPSILON = 1e-8
"""Constant added to the variance of advantages, as in verl's masked_whiten."""

Groups = Sequence[Sequence[float]]


def group_advantages(
    rewards: list[list[float]],
    estimator: AdvantageEstimator,
    lengths: list[list[int]] | None = None,
    episodes: list[list[int]] | None = None,
    baselines: Sequence[float] = (),
) -> list[list[float]]:
    """Return one advantage for every trajectory, by groups, in the order of `rewards`.

    `registry.ESTIMATORS` lists the formulas and their sources; std divides by n - 1.

    episodes: the number of each trajectory's episode, equal numbers side by side; None: every
    trajectory is an episode. Mean, std, n and the leave-one-out mean are over episodes, so an episode
    counts once however often it branches; its reward is the mean of its trajectories' rewards, while r
    is a trajectory's own. An episode with one reward therefore gives all its trajectories one
    advantage, as in slime (`slime/utils/ppo_utils.py`, `group_relative_advantages`); with a reward for
    each trajectory, only the baseline is over episodes. verl has no episodes: every row of a prompt is
    a sample there.

    lengths: the number of trained tokens of every trajectory, for opo and for estimators that whiten
    over tokens.

    baselines: the reward of each group's greedy answer, for remax.

    If all episodes of a group have the same reward, estimators that compare and do not whiten give
    exactly 0. Raises ValueError for an unknown estimator and for missing lengths.
    """
    require_choice("estimator", estimator, AdvantageEstimator)
    entry = ESTIMATORS[estimator]
    if entry.baseline == "greedy":
        compared = zip(rewards, baselines, strict=True)
        return [[reward - greedy for reward in group] for group, greedy in compared]
    if entry.whitens or entry.baseline == "by-length":
        _require_lengths(rewards, lengths)
    groups = [
        _Group(group, range(len(group)) if episodes is None else episodes[i],
               None if lengths is None else lengths[i])
        for i, group in enumerate(rewards)
    ]  # fmt: skip
    of_all = torch.cat([group.rewards for group in groups]) if groups else torch.zeros(0)
    advantages = [group.advantages(entry, of_all) for group in groups]
    if entry.whitens:
        values = list(chain.from_iterable(advantages))
        pairs = zip(_require_lengths(rewards, lengths), values, strict=True)
        whitened = whitening([[pair] for pair in pairs])
        advantages = [[whitened(a) for a in group] for group in advantages]
    return advantages


def named_advantages(
    named: Mapping[str, list[list[float]]],
    weights: Mapping[str, float],
    episodes: list[list[int]] | None = None,
) -> list[list[float]]:
    """Return GDPO's advantages (arXiv 2601.05242): grpo of each reward, their weighted sum, normalised
    over all trajectories. A reward of large scale does not drown the others."""
    each = {
        name: group_advantages(groups, "grpo", None, episodes) for name, groups in named.items()
    }
    sums = [
        [fsum(weights[name] * a for name, a in zip(each, parts, strict=True))
         for parts in zip(*of_group, strict=True)]
        for of_group in zip(*each.values(), strict=True)
    ]  # fmt: skip
    every = torch.tensor(list(chain.from_iterable(sums)), dtype=torch.float64)
    if len(every) < 2 or (every == every[:1]).all():
        return [[0.0] * len(group) for group in sums]
    center, scale = float(every.mean()), float(every.std()) + EPSILON
    return [[(a - center) / scale for a in group] for group in sums]


class _Group:
    """The trajectories of one prompt, and the episodes that they belong to."""

    def __init__(
        self, rewards: Sequence[float], episodes: Sequence[int], lengths: Sequence[int] | None
    ):
        pairs = groupby(zip(episodes, rewards, strict=True), key=lambda pair: pair[0])
        parts = [[reward for _, reward in part] for _, part in pairs]
        self.each = torch.tensor(rewards, dtype=torch.float64)
        self.rewards = torch.tensor([mean(part) for part in parts], dtype=torch.float64)
        self.counts = torch.tensor([len(part) for part in parts])
        self.lengths = torch.tensor(lengths or [0] * len(rewards), dtype=torch.float64)

    def advantages(self, entry: EstimatorEntry, of_all: Tensor) -> list[float]:
        """Return the advantages before whitening. of_all: the episode rewards of all groups."""
        if entry.baseline == "none":
            return self.each.tolist()
        if (self.rewards == self.rewards[:1]).all():
            return [0.0] * len(self.each)
        centered = self._centered(entry)
        if entry.scale != "none":
            of = self.rewards if entry.scale == "group" else of_all
            centered = centered / (of.std() + EPSILON)
        advantages: list[float] = centered.tolist()
        return advantages

    def _centered(self, entry: EstimatorEntry) -> Tensor:
        episodes_own, center = self.rewards.repeat_interleave(self.counts), self.rewards.mean()
        if entry.baseline == "others":
            count = len(self.rewards)
            left_out = (episodes_own - center) * (count / max(count - 1, 1))
            return left_out + (self.each - episodes_own)
        if entry.baseline == "by-length":
            return self.each - (self.lengths * self.each).sum() / self.lengths.sum()
        if entry.baseline == "second-best":
            best, second = self.rewards.topk(2).values
            return torch.where(episodes_own == best, best - second, 0)
        return self.each - center


def returns(token_rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """Return the discounted sum of rewards from each token on, [R], in float64, added from the last
    token back."""
    return [*accumulate(reversed(token_rewards), lambda later, r: r + gamma * later)][::-1]


def _require_lengths(rewards: list[list[float]], lengths: list[list[int]] | None) -> list[int]:
    """Return the length of every trajectory in one list. Raises ValueError if they do not fit the
    rewards."""
    if lengths is None or [len(group) for group in lengths] != [len(group) for group in rewards]:
        raise ValueError(
            f"lengths={lengths}: REINFORCE++ whitens over tokens. Give the length of every response, "
            "in groups like those of the rewards."
        )
    return [length for group in lengths for length in group]


def whitening(
    trajectories: Sequence[Sequence[tuple[int, float]]], gather: Gather = alone
) -> Callable[[float], float]:
    """Return verl's masked_whiten (verl/utils/torch_functional.py) as a function of a token's value a:

    (a - m) / sqrt(v + 1e-8), m = sum n a / N, v = sum n (a - m)^2 / (N - 1), N = sum n,

    where n tokens have the value a.

    trajectories: pairs (n, a) of each trajectory of this rank. Sums over a trajectory are rounded, and
    their total is rounded once, so that no bit depends on the number of ranks.
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
