"""Metrics of a rollout's episodes, of an evaluation set (avg@n, pass@k and maj@n), and of idle time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import comb
from statistics import fmean, pstdev

from onpolicy.config.groups.evaluation_flags import ks_of
from onpolicy.trajectory import FinishReason, Trajectory
from onpolicy.types import Sample, SampleGroup

COUNTED = (
    "num_empty_groups",
    "num_rewarded",
    "num_token_rewarded",
    "num_trajectories",
    "num_turns",
)
"""The metrics `episodes/*` that the run counts itself, so that no episode may report them."""


def rollout_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return rewards, lengths and log-probabilities of a training rollout; without any episode,
    only the number of empty groups. Rewards are over the episodes that could be scored."""
    metrics = {"episodes/num_empty_groups": float(sum(not group.samples for group in groups))}
    episodes = _episodes(groups)
    if not episodes:
        return metrics
    samples = [sample for episode in episodes for sample in episode]
    return {
        **_rewards(groups),
        "rollout/response_length": mean_response_length(groups),
        "rollout/response_length_max": float(max(map(_length, episodes))),
        "rollout/truncated_ratio": truncated_ratio(groups),
        "rollout/log_probs": fmean(x for sample in samples for x in sample.rollout_log_probs),
        **_cache_metrics([sample.trajectory for sample in samples]),
        **reward_parts(groups, "rollout/reward"),
        **metrics,
        **_episode_metrics(episodes),
    }


def _rewards(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return the reward metrics of the scored episodes; an empty mapping if there are none."""
    rewards = [reward for group in groups for reward in group.rewards]
    if not rewards:
        return {}
    return {"rollout/raw_reward": fmean(rewards), "rollout/reward_std": pstdev(rewards)}


def reward_parts(groups: Sequence[SampleGroup], prefix: str) -> dict[str, float]:
    """Return the means of reward functions' further numbers, as `prefix`/NAME: over the trajectories
    of each episode, then over the episodes."""
    scored = [episode for group in groups for episode in group.scored_episodes]
    return _means(prefix, [_means("", [s.reward_parts for s in each]) for each in scored])


def _cache_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the tokens that engines found in their prefix caches, and the hit rate."""
    cached = sum(trajectory.num_cached_tokens for trajectory in trajectories)
    asked = sum(trajectory.num_prefix_tokens for trajectory in trajectories)
    rate = {"rollout/prefix_cache_hit_rate": cached / asked} if asked else {}
    return {"rollout/num_cached_tokens": float(cached), **rate}


def _episode_metrics(episodes: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Return counts of the episodes, and the means of the metrics they report."""
    return {
        "episodes/num_turns": fmean(sum(map(_num_turns, episode)) for episode in episodes),
        "episodes/num_trajectories": fmean(map(len, episodes)),
        "episodes/num_rewarded": float(sum(episode[0].is_rewarded for episode in episodes)),
        "episodes/num_token_rewarded": float(
            sum(episode[0].token_rewards is not None for episode in episodes)
        ),
        **_means("episodes", [episode[0].metrics for episode in episodes]),
    }


def _num_turns(sample: Sample) -> int:
    """Count the stretches of sampled tokens."""
    return sum(then and not here for here, then in pairwise(sample.trajectory.sampled))


def _means(prefix: str, each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every name over the mappings that have it."""
    names = sorted({name for one in each for name in one})
    slash = prefix and f"{prefix}/"
    return {slash + name: fmean(one[name] for one in each if name in one) for name in names}


def mean_response_length(groups: Sequence[SampleGroup]) -> float:
    """Return the mean of sampled tokens over all episodes, truncated or not; there must be one."""
    return fmean(map(_length, _episodes(groups)))


def truncated_ratio(groups: Sequence[SampleGroup]) -> float:
    """Return the share of episodes with a trajectory that was truncated at the length limit."""
    return fmean(
        any(s.finish_reason == FinishReason.LENGTH for s in episode)
        for episode in _episodes(groups)
    )


def _episodes(groups: Iterable[SampleGroup]) -> list[list[Sample]]:
    return [episode for group in groups for episode in group.episodes]


def _length(episode: Sequence[Sample]) -> int:
    return sum(sample.trajectory.num_sampled for sample in episode)


def eval_metrics(
    groups: Sequence[SampleGroup], count: int, name: str = "", num_failed: float | None = None
) -> dict[str, float]:
    """Return the metrics of `count` episodes per prompt; one with a positive reward passes.

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
    """Return the chance that k of n episodes, drawn without replacement, have one of c that passed.

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


def idle_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the idle share of a step's time for each side: time without work, pushes or probes."""
    step, push = metrics["perf/step_time"], metrics["perf/weight_sync_time"]
    push += metrics["perf/probe_time"]
    busy = {
        "rollout": metrics["perf/rollout_time"] + push,
        "trainer": metrics.get("perf/train_time", 0.0) + push,
    }
    return {f"perf/{side}_idle_share": max(0.0, 1 - s / step) for side, s in busy.items()}
