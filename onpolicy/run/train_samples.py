"""From a rollout's scored groups to what training takes: the samples of those with a signal."""

from __future__ import annotations

from collections.abc import Sequence

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
    return len({sample.reward for sample in group.samples}) > 1


def make_train_samples(
    groups: Sequence[SampleGroup], policy_version: int | None = None
) -> list[TrainSample]:
    """The groups' samples, in their order.

    `policy_version`: of the policy that is to learn from them, if that may be a later one.
    """
    return [
        TrainSample(sample=sample, group=number, policy_version=policy_version)
        for number, group in enumerate(groups)
        for sample in group.samples
    ]
