"""Metrics of a rollout's episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, pstdev

from onpolicy.trajectory import FinishReason, Trajectory
from onpolicy.types import Sample, SampleGroup

Episode = Sequence[Sample]
"""The samples of an episode's trajectories."""

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
    greedy = [group.greedy for group in groups if group.greedy and not group.greedy.has_failed]
    return {
        "rollout/raw_reward": fmean(rewards),
        "rollout/reward_std": pstdev(rewards),
        **_means("rollout", [{"greedy_reward": sample.reward} for sample in greedy]),
    }


def reward_parts(groups: Sequence[SampleGroup], prefix: str) -> dict[str, float]:
    """Return the mean over scored episodes of each further number from reward functions, as
    `prefix`/NAME."""
    scored = [episode for group in groups for episode in group.scored_episodes]
    return _means(prefix, [_mean_parts(episode) for episode in scored])


def _cache_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the tokens that engines found in their prefix caches, and the hit rate."""
    cached = sum(trajectory.num_cached_tokens for trajectory in trajectories)
    asked = sum(trajectory.num_prefix_tokens for trajectory in trajectories)
    rate = {"rollout/prefix_cache_hit_rate": cached / asked} if asked else {}
    return {"rollout/num_cached_tokens": float(cached), **rate}


def _episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
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


def _mean_parts(episode: Episode) -> dict[str, float]:
    """Return the further numbers of a reward function, averaged over the trajectories that have
    them."""
    return _means("", [sample.reward_parts for sample in episode])


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


def _episodes(groups: Iterable[SampleGroup]) -> list[Episode]:
    return [episode for group in groups for episode in group.episodes]


def _length(episode: Episode) -> int:
    return sum(sample.trajectory.num_sampled for sample in episode)


def idle_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the idle share of a step's time for each side: time without work, pushes or probes."""
    step, push = metrics["perf/step_time"], metrics["perf/weight_sync_time"]
    push += metrics["perf/probe_time"]
    busy = {
        "rollout": metrics["perf/rollout_time"] + push,
        "trainer": metrics.get("perf/train_time", 0.0) + push,
    }
    return {f"perf/{side}_idle_share": max(0.0, 1 - s / step) for side, s in busy.items()}
