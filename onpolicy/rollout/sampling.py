"""Prompts into requests, and completions into samples."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.errors import EngineError
from onpolicy.rollout.seeds import sampling_seed
from onpolicy.types import (
    Completion,
    Prompt,
    Request,
    Sample,
    SampleGroup,
    SamplingParams,
    Span,
)


def make_requests(
    prompts: Sequence[Prompt], num_samples: int, params: SamplingParams, *seed_key: int | str
) -> list[Request]:
    """`num_samples` requests per prompt, in order; each with a seed of its own.

    The seed depends on `seed_key`, on where the prompt stands in the batch (a prompt may come
    twice), and on the sample.
    """
    return [
        request
        for position, prompt in enumerate(prompts)
        for request in make_group(prompt, num_samples, params, *seed_key, position)
    ]


def make_group(
    prompt: Prompt, num_samples: int, params: SamplingParams, *seed_key: int | str
) -> list[Request]:
    """`num_samples` requests of one prompt; `seed_key` ends with where it stands in the batch."""
    return [
        Request(
            prompt_ids=prompt.prompt_ids,
            sampling_seed=sampling_seed(*seed_key, prompt.index, sample),
            params=params,
        )
        for sample in range(num_samples)
    ]


def group_samples(
    prompts: Sequence[Prompt], completions: Sequence[Completion], texts: Sequence[str]
) -> list[SampleGroup]:
    """The completions of `make_requests`, by prompt, with their decoded texts."""
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
    return groups


def require_version(completion: Completion, version: str, *, by_token: bool = False) -> None:
    """Raise EngineError for a response with a token from other weights than those of `version`.

    `by_token`: the engine has to say it of every token, and not of the last one alone.
    """
    spans, length = completion.spans, len(completion.response_ids)
    if completion.weight_version != version:
        raise EngineError(
            f"weight_version={completion.weight_version} on a response, but the policy's is "
            f"{version}: an engine sampled from other weights. Something else pushes "
            "weights to it, or it was restarted behind our back; start it again."
        )
    if by_token and not spans:
        raise EngineError(
            "weight_versions: the engine does not say which weights each token was sampled from, and "
            "samples are trained on under later ones. Use the newest supported SGLang, or leave "
            "--rollout-lag, --rollout-segment-tokens and --rollout-schedule out."
        )
    if spans and spans != (Span(version=version, start=0, end=length),):
        found = ", ".join(f"{span.start} to {span.end}: {span.version}" for span in spans)
        raise EngineError(
            f"weight_versions={found} on a response of {length} tokens, which all were to be of "
            f"{version}: its engine took weights while it sampled. Something else pushes weights to it."
        )
