"""Advantages: from the rewards of groups of episodes, and from a critic's values (GAE).

`value_loss` is the loss by which the critic learns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, groupby
from math import fsum, sqrt
from statistics import mean

import torch
from torch import Tensor

from fallback_correction.ranges import require_choice
from fallback_correction.tokens import Gather, alone, exact_sum
from onpolicy.algorithm.catalogue import ESTIMATORS, AdvantageEstimator, EstimatorEntry
from onpolicy.algorithm.objectives import TokenLoss

EPSILON = 1e-6

WHITENING_EPSILON = 1e-8
"""Constant added to the variance of advantages, as in verl's masked_whiten."""

Groups = Sequence[Sequence[float]]


def group_advantages(
    rewards: list[list[float]],
    estimator: AdvantageEstimator,
    lengths: list[list[int]] | None = None,
    episodes: list[list[int]] | None = None,
) -> list[list[float]]:
    """Return one advantage for every trajectory, by groups, in the order of `rewards`.

    `catalogue.ESTIMATORS` lists the formulas and their sources; std divides by n - 1.

    episodes: the number of each trajectory's episode, equal numbers side by side; None: every
    trajectory is an episode. Mean, std, n and the leave-one-out mean are over episodes, so an episode
    counts once however often it branches; its reward is the mean of its trajectories' rewards, while r
    is a trajectory's own. An episode with one reward therefore gives all its trajectories one
    advantage, as in slime (`slime/utils/ppo_utils.py`, `group_relative_advantages`); with a reward for
    each trajectory, only the baseline is over episodes. verl has no episodes: every row of a prompt is
    a sample there.

    lengths: the number of trained tokens of every trajectory, for estimators that whiten over tokens.

    If all episodes of a group have the same reward, estimators that compare and do not whiten give
    exactly 0. Raises ValueError for an unknown estimator and for missing lengths.
    """
    require_choice("estimator", estimator, AdvantageEstimator)
    entry = ESTIMATORS[estimator]
    if entry.whitens:
        _require_lengths(rewards, lengths)
    groups = [
        _Group(group, range(len(group)) if episodes is None else episodes[i])
        for i, group in enumerate(rewards)
    ]  # fmt: skip
    advantages = [group.advantages(entry) for group in groups]
    if entry.whitens:
        values = list(chain.from_iterable(advantages))
        pairs = zip(_require_lengths(rewards, lengths), values, strict=True)
        whitened = whitening([[pair] for pair in pairs])
        advantages = [[whitened(a) for a in group] for group in advantages]
    return advantages


def _require_lengths(rewards: list[list[float]], lengths: list[list[int]] | None) -> list[int]:
    """Return the length of every trajectory in one list. Raises ValueError if they do not fit the
    rewards."""
    if lengths is None or [len(group) for group in lengths] != [len(group) for group in rewards]:
        raise ValueError(
            f"lengths={lengths}: REINFORCE++ whitens over tokens. Give the length of every response, "
            "in groups like those of the rewards."
        )
    return [length for group in lengths for length in group]


class _Group:
    """The trajectories of one prompt, and the episodes that they belong to."""

    def __init__(self, rewards: Sequence[float], episodes: Sequence[int]):
        pairs = groupby(zip(episodes, rewards, strict=True), key=lambda pair: pair[0])
        parts = [[reward for _, reward in part] for _, part in pairs]
        self.each = torch.tensor(rewards, dtype=torch.float64)
        self.rewards = torch.tensor([mean(part) for part in parts], dtype=torch.float64)
        self.counts = torch.tensor([len(part) for part in parts])

    def advantages(self, entry: EstimatorEntry) -> list[float]:
        """Return the advantages before whitening."""
        if entry.baseline == "none":
            return self.each.tolist()
        if (self.rewards == self.rewards[:1]).all():
            return [0.0] * len(self.each)
        centered = self._centered(entry)
        if entry.scale == "group":
            centered = centered / (self.rewards.std() + EPSILON)
        advantages: list[float] = centered.tolist()
        return advantages

    def _centered(self, entry: EstimatorEntry) -> Tensor:
        center = self.rewards.mean()
        if entry.baseline == "others":
            episodes_own = self.rewards.repeat_interleave(self.counts)
            count = len(self.rewards)
            left_out = (episodes_own - center) * (count / max(count - 1, 1))
            return left_out + (self.each - episodes_own)
        return self.each - center


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


def returns(token_rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """Return the discounted sum of rewards from each token on, [R], in float64, added from the last
    token back."""
    return [*accumulate(reversed(token_rewards), lambda later, r: r + gamma * later)][::-1]


def generalized_advantages(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lambd: float
) -> list[float]:
    """Return GAE of a trajectory's sampled tokens (arXiv 1506.02438, eq. 16), [R], in float64.

    A_t = delta_t + gamma lambd A_t+1, delta_t = r_t + gamma V_t+1 - V_t, where t + 1 is the next
    *sampled* token: given tokens between two turns are skipped, as in verl
    (`compute_gae_advantage_return` in verl/trainer/ppo/core_algos.py). The value after the last token
    is 0, whether a stop token or the length limit ended the trajectory.
    """
    advantages: list[float] = []
    after, value_after = 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        after = reward + gamma * value_after - value + gamma * lambd * after
        value_after = value
        advantages.append(after)
    return advantages[::-1]


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> TokenLoss:
    """Return PPO's clipped loss of every value: three float32 [R], of which `values` has the gradient.

    max((V - R)^2, (V_clipped - R)^2) / 2, where V_clipped is V clipped to `clip` around the value
    before the first optimizer step. Sources: verl's `compute_value_loss`
    (verl/trainer/ppo/core_algos.py), TRL's PPOTrainer. A token counts as clipped where clipping changes
    its loss; it has no gradient there.
    """
    bounded = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    plain, clipped = (values - returns) ** 2, (bounded - returns) ** 2
    return TokenLoss(loss=torch.maximum(plain, clipped) / 2, clipped=clipped > plain)
