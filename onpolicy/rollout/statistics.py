"""Metrics of a rollout's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

from onpolicy.trajectory import FinishReason
from onpolicy.types import SampleGroup


def rollout_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Rewards, lengths and log-probabilities of a training rollout."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples]
    lengths = [sample.trajectory.num_sampled for sample in samples]
    log_probs = [x for sample in samples for x in sample.rollout_log_probs]
    metrics = {
        "rollout/raw_reward": fmean(rewards),
        "rollout/reward_std": pstdev(rewards),
        "rollout/response_length": mean_response_length(groups),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/truncated_ratio": truncated_ratio(groups),
        "rollout/log_probs": fmean(log_probs),
        "rollout/num_cached_tokens": float(sum(sample.num_cached_tokens for sample in samples)),
    }
    for name in sorted({name for sample in samples for name in sample.reward_parts}):
        parts = [sample.reward_parts[name] for sample in samples if name in sample.reward_parts]
        metrics[f"rollout/reward/{name}"] = fmean(parts)
    return metrics


def eval_metrics(groups: Sequence[SampleGroup], eval_set: str = "") -> dict[str, float]:
    """avg@k and pass@k of an evaluation; a sample passes if its reward is positive.

    The names are `eval/avg@k` and so on; those of a set with a name are `eval/NAME/avg@k`.
    """
    prefix = f"eval/{eval_set}/" if eval_set else "eval/"
    samples = [sample for group in groups for sample in group.samples]
    return {
        f"{prefix}avg@k": fmean(sample.reward for sample in samples),
        f"{prefix}pass@k": fmean(any(s.reward > 0 for s in group.samples) for group in groups),
        f"{prefix}truncated_ratio": truncated_ratio(groups),
        f"{prefix}response_length": mean_response_length(groups),
    }


def mean_response_length(groups: Sequence[SampleGroup]) -> float:
    """Mean sampled tokens of all responses, cut off or not."""
    return fmean(s.trajectory.num_sampled for group in groups for s in group.samples)


def truncated_ratio(groups: Sequence[SampleGroup]) -> float:
    """Share of the responses that were cut off at the length limit."""
    return fmean(s.finish_reason == FinishReason.LENGTH for g in groups for s in g.samples)


def idle_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """The share of a step's time in which each side had nothing to do: no weights to push or probe."""
    step, push = metrics["perf/step_time"], metrics["perf/weight_sync_time"]
    push += metrics["perf/probe_time"]
    busy = {
        "rollout": metrics["perf/rollout_time"] + push,
        "trainer": metrics.get("perf/train_time", 0.0) + push,
    }
    return {f"perf/{side}_idle_share": max(0.0, 1 - s / step) for side, s in busy.items()}
