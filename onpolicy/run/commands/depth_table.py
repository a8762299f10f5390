"""Differences of log-probabilities by depth, the number of tokens before a sampled token.

Errors of attention, positions or a cache grow with the context, which a mean over all tokens hides.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from onpolicy.parity import k3
from onpolicy.trajectory import Trajectory

FIRST = 64
"""The depth at which the second bucket begins; each further bucket is as deep as all before it."""

FACTORS = (1.28, 2)
"""The ratios of a token's two probabilities, either way, beyond which tokens are counted."""

NUMBERS = ("k3_kl_mean", "mean_abs_diff", "max_abs_diff")
Bucket = dict[str, float]
Apart = tuple[Tensor, Tensor, Tensor]
"""The arguments of `by_depth`."""


def depths_of(trajectories: Iterable[Trajectory]) -> Tensor:
    """Return the depth of each sampled token of some trajectories: int64 [R]."""
    return torch.cat([torch.tensor(each.sampled.array).nonzero()[:, 0] for each in trajectories])


def by_depth(depths: Tensor, train: Tensor, rollout: Tensor) -> list[Bucket]:
    """Return the numbers of each bucket that has tokens, in ascending order.

    depths: int64 [R]; train, rollout: float32 [R]. What is not finite is beyond every factor.
    """
    buckets = torch.tensor([(depth // FIRST).bit_length() for depth in depths.tolist()])
    found = []
    for bucket in buckets.unique().tolist():
        mine = buckets == bucket
        first, last = FIRST << (bucket - 1) if bucket else 0, (FIRST << bucket) - 1
        found.append({"from": first, "to": last, **differences(train[mine], rollout[mine])})
    return found


def differences(train: Tensor, rollout: Tensor) -> Bucket:
    """Return how far log-probabilities are apart: [R], [R] -> nats, and shares beyond FACTORS."""
    apart = (train.double() - rollout.double()).abs()
    return {
        "num_tokens": len(apart),
        "k3_kl_mean": float(k3(train, rollout).mean()),
        "mean_abs_diff": float(apart.mean()),
        "max_abs_diff": float(apart.max()),
        **{f"share_beyond_{x}": float((~(apart <= math.log(x))).double().mean()) for x in FACTORS},
    }


def table(buckets: Sequence[Bucket]) -> str:
    """Return the buckets as lines of text."""
    beyond = "".join(f"{f'>{factor}x':>9}" for factor in FACTORS)
    lines = [f"{'depth':>15}{'tokens':>9}{'k3':>12}{'mean |d|':>12}{'max |d|':>12}{beyond}"]
    for each in buckets:
        depth = f"{each['from']}-{each['to']}"
        numbers = "".join(f"{each[name]:>12.3g}" for name in NUMBERS)
        shares = "".join(f"{each[f'share_beyond_{factor}']:>9.2%}" for factor in FACTORS)
        lines.append(f"{depth:>15}{each['num_tokens']:>9}{numbers}{shares}")
    return "\n".join(lines)
