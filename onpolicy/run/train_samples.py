"""What training takes of a rollout, the samples of groups with a signal; and what it says of them."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.config import TrainConfig
from onpolicy.token_weights import require_terms
from onpolicy.types import ParityFindings, SampleGroup, TrainOutcome, TrainSample


def worth_training(groups: Sequence[SampleGroup], config: TrainConfig) -> Sequence[SampleGroup]:
    """The groups that have an episode, or with --filter-equal-rewards those whose rewards differ.

    Raises ConfigError for weights of a term that the loss does not have.
    """
    for sample in (sample for group in groups for sample in group.samples):
        require_terms(config, sample.token_weights, sample.name)
    if not config.algorithm.filter_equal_rewards:
        return [group for group in groups if group.samples]
    return [group for group in groups if has_signal(group)]


def has_signal(group: SampleGroup) -> bool:
    """Whether the rewards of a group's episodes differ, from that of its greedy answer if it has one."""
    greedy = [] if group.greedy is None else [group.greedy.reward]
    return len({*group.rewards, *greedy}) > 1


def make_train_samples(
    groups: Sequence[SampleGroup], policy_version: int | None = None
) -> list[TrainSample]:
    """The groups' samples, in their order.

    `policy_version`: of the policy that is to learn from them, if that may be a later one.
    """
    episodes = [
        (number, episode) for number, group in enumerate(groups) for episode in group.episodes
    ]
    return [
        TrainSample(
            sample=sample,
            group=group,
            episode=number,
            policy_version=policy_version,
            baseline=None if (greedy := groups[group].greedy) is None else greedy.reward,
        )
        for number, (group, episode) in enumerate(episodes)
        for sample in episode
    ]


def note_learnt(outcome: TrainOutcome, samples: Sequence[TrainSample]) -> None:
    """Put what was learnt of the samples that are shown beside them."""
    for number, learnt in outcome.learnt.items():
        samples[number].sample.learnt = learnt


def note_findings(
    findings: ParityFindings | None, samples: Sequence[TrainSample]
) -> tuple[int, Sequence[float]] | None:
    """Put beside the samples how many of their tokens differed; where the comparison failed, if it did
    (`ParityFindings.apart`)."""
    if findings is None:
        return None
    for one, count in zip(samples, findings.mismatched_tokens, strict=True):
        one.sample.mismatched_tokens = count
    return findings.apart
