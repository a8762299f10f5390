"""Metrics of an evaluation set: avg@n, pass@k and maj@n."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb
from statistics import fmean

from onpolicy.config.groups.evaluation import ks_of
from onpolicy.rollout.statistics import mean_response_length, reward_parts, truncated_ratio
from onpolicy.types import SampleGroup


def eval_metrics(
    groups: Sequence[SampleGroup], count: int, name: str = "", num_failed: float | None = None
) -> dict[str, float]:
    """Return the metrics of `count` episodes per prompt; an episode passes if its reward is
    positive.

    They are `eval/avg@8` and so on, and `eval/NAME/avg@8` for a set with a name; `eval/reward/PART`
    is the mean of one of several rewards. An episode that could not be scored counts in none of
    these, and `eval/num_unscored` is the number of such samples, if any. A prompt without an
    episode is excluded, one with fewer than k from pass@k; a metric without any prompt is missing,
    and so is maj@n where no episode has an answer. num_failed: failed attempts at episodes, where a
    function runs the episodes.
    """
    found = {} if num_failed is None else {"num_failed_episodes": num_failed}
    if num_unscored := sum(sample.has_failed for group in groups for sample in group.samples):
        found["num_unscored"] = float(num_unscored)
    if scored := [group for group in groups if group.rewards]:
        found |= _of_rewards(scored, count)
    if there := [group for group in groups if group.samples]:
        found["truncated_ratio"] = truncated_ratio(there)
        found["response_length"] = mean_response_length(there)
        found |= reward_parts(there, "reward")
    prefix = f"eval/{name}/" if name else "eval/"
    return {prefix + metric: value for metric, value in found.items()}


def _of_rewards(groups: Sequence[SampleGroup], count: int) -> dict[str, float]:
    """Return the metrics of prompts that each have a scored episode."""
    passed = [[reward > 0 for reward in group.rewards] for group in groups]
    found = {f"avg@{count}": fmean(reward for group in groups for reward in group.rewards)}
    for k in ks_of(count):
        if enough := [each for each in passed if len(each) >= k]:
            found[f"pass@{k}"] = fmean(pass_at_k(len(each), sum(each), k) for each in enough)
    answers = [[episode[-1].answer for episode in group.scored_episodes] for group in groups]
    if count > 1 and any(answer is not None for each in answers for answer in each):
        found[f"maj@{count}"] = fmean(map(majority_passes, answers, passed))
    return found


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that k of n episodes, drawn without replacement, include one of the c that
    passed.

    It is the unbiased estimate of the chance for k new episodes: 1 - C(n - c, k) / C(n, k), k <= n
    (Chen et al. 2021, arXiv 2107.03374, eq. 1), computed here in integers and rounded once.
    """
    return (comb(n, k) - comb(n - c, k)) / comb(n, k)


def majority_passes(answers: Sequence[str | None], passed: Sequence[bool]) -> float:
    """Return the chance that the most frequent answer to a prompt passes; 0 if there is no answer.

    Ties are broken by a draw, so the order of the episodes does not matter: verl's maj@N, a mean
    over 1,000 draws with replacement, takes the first. Should equal answers differ in passing, an
    episode of the answer is drawn too.
    """
    votes = Counter(filter(None, answers))
    if not votes:
        return 0.0
    most = max(votes.values())
    first = [
        passes
        for answer, passes in zip(answers, passed, strict=True)
        if votes[answer or ""] == most
    ]
    return fmean(first)
