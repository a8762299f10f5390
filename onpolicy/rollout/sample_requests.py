"""Conversion of prompts into requests with their seeds, and of completions into samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onpolicy.errors import EngineError
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.results import spans_of
from onpolicy.rollout.rollouter import Rollouter
from onpolicy.rollout.seeds import sampling_seed, seeds_of
from onpolicy.rollout.turns import EpisodeRules
from onpolicy.trajectory import Completion, Span, Trajectory
from onpolicy.types import Prompt, Request, SampleGroup, SamplingParams

Decode = Callable[[Sequence[list[int]]], Sequence[str]]
"""A function from the token ids of each response to its text."""


def make_requests(
    prompts: Sequence[Prompt], num_samples: int, params: SamplingParams, *seed_key: int | str
) -> list[Request]:
    """Return `num_samples` requests per prompt, in order, each with a seed of its own.

    The seed depends on `seed_key`, on the prompt's position in the batch (a prompt may occur
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
    """Return `num_samples` requests of one prompt; `seed_key` ends with its position in the batch."""
    return [
        Request(
            prompt_ids=prompt.prompt_ids,
            images=prompt.images,
            sampling_seed=sampling_seed(*seed_key, prompt.index, sample),
            params=params,
        )
        for sample in range(num_samples)
    ]


def open_group(
    number: int,
    prompt: Prompt,
    requests: Sequence[Request],
    rollouter: Rollouter,
    rules: EpisodeRules | None = None,
) -> list[OpenEpisode]:
    """Return a group: one attempt at the prompt for each initial request; none is begun."""
    return [
        OpenEpisode(rollouter, prompt, request, rules, number=number, index=i)
        for i, request in enumerate(requests)
    ]


def trajectories_of(
    requests: Sequence[Request], completions: Sequence[Completion]
) -> list[Trajectory]:
    """Return the trajectory of each request and its completion."""
    return [
        Trajectory.begin(request.prompt_ids, request.images).plus(
            completion, request.params.temperature, request.params.grammar
        )
        for request, completion in zip(requests, completions, strict=True)
    ]


def sample_groups(groups: Sequence[Sequence[OpenEpisode]], decode: Decode) -> list[SampleGroup]:
    """Convert complete groups into groups of samples; `decode` makes text of sampled tokens."""
    drawn = [(each, sample) for group in groups for each in group for sample in each.samples or ()]
    # Decode all trajectories in one call.
    texts = decode([sample.response_ids for _, sample in drawn]) if drawn else []
    for (each, sample), text in zip(drawn, texts, strict=True):
        sample.response = text
        sample.seeds = seeds_of(sample.trajectory, each.turns.request.sampling_seed)
    return [
        SampleGroup(
            prompt=group[0].prompt,
            samples=[sample for each in group for sample in each.samples or ()],
            number=group[0].number,
            branches=[spans_of(each.record() if each.samples else ()) for each in group],
        )
        for group in groups
    ]


def require_version(completion: Completion, version: int, *, by_token: bool = False) -> None:
    """Raise EngineError for a response with a token from other weights than `version`.

    `by_token`: require the engine to report the version of every token, not only of the last one.
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
            "--rollout-lag and --rollout-schedule out."
        )
    if spans and spans != (Span(version=version, start=0, end=length),):
        found = ", ".join(f"{span.start} to {span.end}: {span.version}" for span in spans)
        raise EngineError(
            f"weight_versions={found} on a response of {length} tokens, which all were to be of "
            f"{version}: its engine took weights while it sampled. Something else pushes weights to it."
        )
