"""Samples made by hand, for tests of whatever takes some."""

import math
from dataclasses import replace

from onpolicy.trajectory import Completion, FinishReason, Trajectory
from onpolicy.types import Prompt, Sample


def make_completion(response_ids, log_probs, **more):
    """A completion that ended by a stop token, of the first weights, unless `more` says otherwise."""
    values = {
        "finish_reason": FinishReason.STOP,
        "weight_version": 0,
        "num_cached_tokens": 0,
        **more,
    }
    return Completion(response_ids=list(response_ids), rollout_log_probs=list(log_probs), **values)


def answered(prompt, completion):
    return Trajectory.begin(prompt.prompt_ids).plus(completion, temperature=1.0)


def to_score(response, label="42", **metadata):
    prompt = Prompt(index=0, prompt_ids=[1], label=label, text="", metadata=metadata)
    trajectory = answered(prompt, make_completion([2], [-1.0]))
    return Sample(prompt=prompt, sample_index=0, trajectory=trajectory, response=response)


def rewards_of(samples):
    """The reward of each sample; None of one that could not be scored."""
    assert all(math.isnan(sample.reward) == sample.has_failed for sample in samples)
    return [None if sample.has_failed else sample.reward for sample in samples]


def make_train_sample(token_ids, prompt_len, log_probs, reward, index=0):
    """A sample of prompt number `index`, whose tokens are the first `prompt_len`.

    Under --advantage-estimator reinforce the reward is the advantage of its tokens.
    """
    prompt = Prompt(index=index, prompt_ids=list(token_ids[:prompt_len]), label="", text="")
    completion = make_completion(token_ids[prompt_len:], log_probs)
    trajectory = answered(prompt, completion)
    return Sample(
        prompt=prompt,
        sample_index=0,
        trajectory=trajectory,
        reward=reward,
        group=index,
        episode=index,
    )


def with_log_probs(sample, log_probs):
    return with_trajectory(sample, rollout_log_probs=list(log_probs))


def with_trajectory(sample, **changes):
    trajectory = replace(sample.trajectory, **changes)
    return replace(sample, trajectory=trajectory)
