"""Samples made by hand, for tests of whatever takes some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from onpolicy.types import Completion, FinishReason, Prompt, Sample, TrainSample


def make_completion(
    response_ids: Sequence[int], log_probs: Sequence[float], **more: Any
) -> Completion:
    """A completion that ended by a stop token, of the first weights, unless `more` says otherwise."""
    values: dict[str, Any] = {
        "finish_reason": FinishReason.STOP,
        "weight_version": "0",
        "num_cached_tokens": 0,
        **more,
    }
    return Completion(response_ids=list(response_ids), rollout_log_probs=list(log_probs), **values)


def make_train_sample(
    token_ids: Sequence[int],
    prompt_len: int,
    log_probs: Sequence[float],
    advantage: float,
    index: int = 0,
) -> TrainSample:
    """A sample of prompt number `index`, whose tokens are the first `prompt_len`."""
    prompt = Prompt(index=index, prompt_ids=list(token_ids[:prompt_len]), label="", text="")
    completion = make_completion(token_ids[prompt_len:], log_probs)
    sample = Sample(prompt=prompt, sample_index=0, completion=completion)
    return TrainSample(sample=sample, advantage=advantage)


def with_log_probs(sample: TrainSample, log_probs: Sequence[float]) -> TrainSample:
    """The sample as if the rollout had said this of its tokens."""
    completion = replace(sample.sample.completion, rollout_log_probs=list(log_probs))
    return replace(sample, sample=replace(sample.sample, completion=completion))
