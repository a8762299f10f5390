"""From a rollout's scored groups to what training takes: those with a signal, and their advantages."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.algorithm.advantages import group_advantages
from onpolicy.config.groups import AlgorithmConfig
from onpolicy.types import SampleGroup, TrainSample


def worth_training(
    groups: Sequence[SampleGroup], algorithm: AlgorithmConfig
) -> Sequence[SampleGroup]:
    """All groups, or with --filter-equal-rewards those whose rewards differ."""
    if not algorithm.filter_equal_rewards:
        return groups
    return [group for group in groups if has_signal(group)]


def has_signal(group: SampleGroup) -> bool:
    """Whether the rewards of a group differ."""
    return len(set(_rewards(group))) > 1


def make_train_samples(
    groups: Sequence[SampleGroup], algorithm: AlgorithmConfig, policy_version: int | None = None
) -> list[TrainSample]:
    """The groups' samples, in their order; all tokens of one have its advantage within its group.

    `policy_version`: of the policy that is to learn from them, if that may be a later one.
    """
    advantages = group_advantages(
        [_rewards(group) for group in groups],
        algorithm.advantage_estimator,
        [[sample.trajectory.num_sampled for sample in group.samples] for group in groups],
    )
    return [
        TrainSample(
            sample=sample,
            advantages=[advantage] * sample.trajectory.num_sampled,
            policy_version=policy_version,
        )
        for group, values in zip(groups, advantages, strict=True)
        for sample, advantage in zip(group.samples, values, strict=True)
    ]


def _rewards(group: SampleGroup) -> list[float]:
    return [sample.reward for sample in group.samples]
