"""The critic's mathematics: generalized advantages, and the loss of its values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onpolicy.algorithm.objectives import TokenLoss


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
