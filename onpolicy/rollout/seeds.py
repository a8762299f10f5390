"""Sampling seeds, which depend on the sample and on no order of arrivals."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from onpolicy.trajectory import Forks, Trajectory


def sampling_seed(*key: int | str) -> int:
    """Return a seed in [0, 2**63) that depends on every part of `key` and on their order.

    Engines use one fixed seed for all requests without any, which makes all samples of a prompt
    equal; so every request gets its own.
    """
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_of_branch(seed: int, forks: Forks) -> int:
    """Return the sampling seed of a branch; `seed` is the seed of the episode's first branch."""
    for key, length in forks:
        seed = sampling_seed(seed, key, length)
    return seed


def seeds_of(trajectory: Trajectory, seed: int) -> Sequence[tuple[int, int]]:
    """Return the seed of each stretch of a trajectory, and the number of tokens sampled with it.

    seed: the seed of the episode's first branch. All requests of a branch have its seed, and an
    engine draws by a token's absolute position, so this determines how every token was drawn.
    """
    return [
        (seed_of_branch(seed, branch), sum(trajectory.sampled[start:end]))
        for branch, start, end in trajectory.stretches
    ]
