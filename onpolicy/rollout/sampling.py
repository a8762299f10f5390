"""Conversion of prompts into requests with their seeds, and of completions into samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from onpolicy.errors import EngineError
from onpolicy.rollout.branches import spans_of
from onpolicy.rollout.episode_rules import EpisodeRules
from onpolicy.rollout.episodes import Rollouter
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.open_groups import OpenGroup
from onpolicy.rollout.results import sample_of
from onpolicy.rollout.seeds import sampling_seed, seeds_of
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
            sampling_seed=sampling_seed(*seed_key, prompt.index, sample),
            params=params,
        )
        for sample in range(num_samples)
    ]


def greedy(request: Request) -> Request:
    """Return the request with greedy sampling, with log-probabilities over all tokens."""
    params = replace(request.params, top_p=1.0, top_k=1, min_p=0.0)
    params = replace(params, return_routed_experts=False, return_entropy=False)
    return replace(request, params=params)


def open_group(
    number: int,
    prompt: Prompt,
    requests: Sequence[Request],
    rollouter: Rollouter,
    rules: EpisodeRules | None = None,
) -> OpenGroup:
    """Return a group with one attempt at the prompt for each initial request; none is begun."""
    rules = rules or EpisodeRules()
    episodes = [
        OpenEpisode(rollouter, prompt, request, rules, number=number, index=i)
        for i, request in enumerate(requests)
    ]
    return OpenGroup(number=number, prompt=prompt, episodes=episodes)


def trajectories_of(
    requests: Sequence[Request], completions: Sequence[Completion]
) -> list[Trajectory]:
    """Return the trajectory of each request and its completion."""
    return [
        Trajectory.begin(request.prompt_ids).plus(
            completion, request.params.temperature, request.params.grammar
        )
        for request, completion in zip(requests, completions, strict=True)
    ]


def sample_groups(groups: Sequence[OpenGroup], decode: Decode) -> list[SampleGroup]:
    """Convert complete groups into groups of samples; `decode` makes text of sampled tokens."""
    drawn = [
        (group, i, episode, number)
        for group in groups
        for i, episode in enumerate(group.episodes)
        for number in range(len(episode.trajectories))
    ]
    # Decode all trajectories in one call.
    answers = [each.trajectories[number].response_ids for _, _, each, number in drawn]
    texts = decode(answers) if drawn else []
    made = [
        SampleGroup(
            prompt=group.prompt,
            samples=[],
            number=group.number,
            branches=[
                spans_of(episode.record() if episode.trajectories else ())
                for episode in group.episodes
            ],
        )
        for group in groups
    ]
    of_number = {group.number: group for group in made}
    for (group, i, each, number), text in zip(drawn, texts, strict=True):
        assert each.episode is not None  # it has trajectories
        sample = sample_of(group.prompt, i, each.episode, each.trajectories, number, text)
        if group.has_greedy and each is group.episodes[-1]:
            sample.is_greedy, of_number[group.number].greedy = True, sample
        else:
            sample.seeds = seeds_of(sample.trajectory, each.turns.request.sampling_seed)
            of_number[group.number].samples.append(sample)
    return made


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
            "--rollout-lag, --rollout-segment-tokens and --rollout-schedule out."
        )
    if spans and spans != (Span(version=version, start=0, end=length),):
        found = ", ".join(f"{span.start} to {span.end}: {span.version}" for span in spans)
        raise EngineError(
            f"weight_versions={found} on a response of {length} tokens, which all were to be of "
            f"{version}: its engine took weights while it sampled. Something else pushes weights to it."
        )
