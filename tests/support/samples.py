"""Samples made by hand, for tests of whatever takes some."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onpolicy.trajectory import Completion, FinishReason, Trajectory
from onpolicy.types import Prompt, Sample, TrainSample


def make_completion(
    response_ids: Sequence[int], log_probs: Sequence[float], **more: Any
) -> Completion:
    """A completion that ended by a stop token, of the first weights, unless `more` says otherwise."""
    values: dict[str, Any] = {
        "finish_reason": FinishReason.STOP,
        "weight_version": 0,
        "num_cached_tokens": 0,
        **more,
    }
    return Completion(response_ids=list(response_ids), rollout_log_probs=list(log_probs), **values)


def answered(prompt: Prompt, completion: Completion) -> Trajectory:
    """A prompt and the answer to it."""
    return Trajectory.begin(prompt.prompt_ids).plus(completion, temperature=1.0)


def to_score(response: str, label: str = "42", **metadata: Any) -> Sample:
    """A sample as reward functions get it."""
    prompt = Prompt(index=0, prompt_ids=[1], label=label, text="", metadata=metadata)
    trajectory = answered(prompt, make_completion([2], [-1.0]))
    return Sample(prompt=prompt, sample_index=0, trajectory=trajectory, response=response)


def rewards_of(samples: Sequence[Sample]) -> list[float | None]:
    """The reward of each sample; None of one that could not be scored."""
    assert all(math.isnan(sample.reward) == sample.has_failed for sample in samples)
    return [None if sample.has_failed else sample.reward for sample in samples]


def make_train_sample(
    token_ids: Sequence[int],
    prompt_len: int,
    log_probs: Sequence[float],
    reward: float,
    index: int = 0,
) -> TrainSample:
    """A sample of prompt number `index`, whose tokens are the first `prompt_len`.

    Under --advantage-estimator reinforce the reward is the advantage of its tokens.
    """
    prompt = Prompt(index=index, prompt_ids=list(token_ids[:prompt_len]), label="", text="")
    completion = make_completion(token_ids[prompt_len:], log_probs)
    trajectory = answered(prompt, completion)
    sample = Sample(prompt=prompt, sample_index=0, trajectory=trajectory, reward=reward)
    return TrainSample(sample=sample, group=index, episode=index)


def with_log_probs(sample: TrainSample, log_probs: Sequence[float]) -> TrainSample:
    """The sample as if the rollout had said this of its tokens."""
    return with_trajectory(sample, rollout_log_probs=list(log_probs))


def with_trajectory(sample: TrainSample, **changes: Any) -> TrainSample:
    """The sample with other fields of its trajectory."""
    trajectory = replace(sample.sample.trajectory, **changes)
    return replace(sample, sample=replace(sample.sample, trajectory=trajectory))
