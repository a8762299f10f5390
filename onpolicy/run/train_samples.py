"""The training samples of a rollout, from groups with a signal; the trainer's findings about them."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.config import TrainConfig
from onpolicy.token_weights import require_terms
from onpolicy.types import ParityFindings, Sample, SampleGroup, TrainOutcome, TrainSample


def worth_training(groups: Sequence[SampleGroup], config: TrainConfig) -> Sequence[SampleGroup]:
    """Return the groups to learn from; with --filter-equal-rewards, those whose rewards differ.

    Raises ConfigError for token weights of a term that the loss does not have.
    """
    for sample in (sample for group in groups for sample in group.samples):
        require_terms(config, sample.token_weights, sample.name)
    if not config.algorithm.filter_equal_rewards:
        return [group for group in groups if _learnt(group)]
    return [group for group in groups if has_signal(group)]


def has_signal(group: SampleGroup) -> bool:
    """Return whether the rewards of a group's scored episodes (and greedy answer) differ."""
    if not _learnt(group):
        return False
    greedy = [] if group.greedy is None else [group.greedy.reward]
    return len({*group.rewards, *greedy}) > 1


def why_nothing_is_learnt(groups: Sequence[SampleGroup]) -> str:
    """Return the reason why none of these groups is worth training."""
    scored = any(group.rewards for group in groups)
    why = "all groups have equal rewards" if scored else "no sample could be scored"
    return f"{why}; nothing to learn from"


def _learnt(group: SampleGroup) -> list[list[Sample]]:
    """Return the episodes of a group to learn from: all that could be scored, or none if the greedy
    answer that they are compared with could not."""
    return [] if group.greedy and group.greedy.has_failed else group.scored_episodes


def make_train_samples(
    groups: Sequence[SampleGroup], policy_version: int | None = None
) -> list[TrainSample]:
    """Return the training samples of groups, in their order.

    policy_version: the version of the policy that will learn from them, if it may be later than theirs.
    """
    episodes = [
        (number, episode) for number, group in enumerate(groups) for episode in _learnt(group)
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
    """Store in the shown samples what the trainer learnt from them."""
    for number, learnt in outcome.learnt.items():
        samples[number].sample.learnt = learnt


def note_findings(
    findings: ParityFindings | None, samples: Sequence[TrainSample]
) -> tuple[int, Sequence[float]] | None:
    """Store in the samples the number of mismatched tokens; return the first difference
    (`ParityFindings.apart`), if any."""
    if findings is None:
        return None
    for one, count in zip(samples, findings.mismatched_tokens, strict=True):
        one.sample.mismatched_tokens = count
    return findings.apart
