"""The training samples of a rollout, from groups with a signal."""

from collections.abc import Sequence

from onpolicy.config import TrainConfig
from onpolicy.token_weights import require_terms
from onpolicy.types import Sample, SampleGroup


def worth_training(groups: Sequence[SampleGroup], config: TrainConfig) -> Sequence[SampleGroup]:
    """Return the groups to learn from; with --filter-equal-rewards, those whose rewards differ.
    Raises ConfigError for token weights of a term that the loss does not have."""
    for sample in (sample for group in groups for sample in group.samples):
        require_terms(config, sample.token_weights, sample.name)
    if not config.algorithm.filter_equal_rewards:
        return [group for group in groups if group.scored_episodes]
    return [group for group in groups if has_signal(group)]


def has_signal(group: SampleGroup) -> bool:
    """Return whether the rewards of a group's scored episodes differ."""
    return len({*group.rewards}) > 1


def make_train_samples(
    groups: Sequence[SampleGroup], policy_version: int | None = None
) -> list[Sample]:
    """Return the samples of groups to train on, in their order, numbered by group and episode.

    policy_version: the version of the policy that will learn from them, if it may be later than theirs.
    """
    samples, number = list[Sample](), 0
    for i, group in enumerate(groups):
        for episode in group.scored_episodes:
            for sample in episode:
                sample.group, sample.episode, sample.policy_version = i, number, policy_version
            samples += episode
            number += 1
    return samples
