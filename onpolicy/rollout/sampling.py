"""Prompts into requests, and completions into samples."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.errors import EngineError
from onpolicy.rollout.seeds import sampling_seed
from onpolicy.types import Completion, Prompt, Request, Sample, SampleGroup, SamplingParams


def make_requests(
    prompts: Sequence[Prompt], num_samples: int, params: SamplingParams, *seed_key: int | str
) -> list[Request]:
    """`num_samples` requests per prompt, in order; each with a seed of its own.

    The seed depends on `seed_key`, on where the prompt stands in the batch (a prompt may come
    twice), and on the sample.
    """
    return [
        Request(
            prompt_ids=prompt.prompt_ids,
            sampling_seed=sampling_seed(*seed_key, position, prompt.index, sample),
            params=params,
        )
        for position, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]


def group_samples(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    texts: Sequence[str],
    weight_version: str,
) -> list[SampleGroup]:
    """The completions of `make_requests`, by prompt, with their decoded texts.

    Raises EngineError for a response that does not come from the weights of `weight_version`.
    """
    num_samples = len(completions) // len(prompts)
    groups = []
    for position, prompt in enumerate(prompts):
        first = position * num_samples
        samples = [
            Sample(
                prompt=prompt,
                sample_index=i,
                completion=completions[first + i],
                response=texts[first + i],
            )
            for i in range(num_samples)
        ]
        groups.append(SampleGroup(prompt=prompt, samples=samples))
    for completion in completions:
        if completion.weight_version != weight_version:
            raise EngineError(
                f"weight_version={completion.weight_version} on a response, but the policy's is "
                f"{weight_version}: an engine sampled from other weights. Something else pushes "
                "weights to it, or it was restarted behind our back; start it again."
            )
    return groups
