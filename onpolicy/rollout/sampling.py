"""Prompts into requests, each with a seed of its own; episodes in rounds; completions into samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from onpolicy.errors import EngineError
from onpolicy.rollout.base import SamplingJob
from onpolicy.rollout.episodes import OpenEpisode, Rollouter
from onpolicy.rollout.open_groups import OpenGroup
from onpolicy.rollout.results import sample_of
from onpolicy.trajectory import Completion, Span, Trajectory
from onpolicy.types import Prompt, Request, SampleGroup, SamplingParams


def sampling_seed(*key: int | str) -> int:
    """A seed in [0, 2**63) that depends on every part of `key` and on their order.

    Engines fall back to one fixed seed for requests without any, which makes all samples of a
    prompt the same; so every request gets its own.
    """
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


Decode = Callable[[Sequence[list[int]]], Sequence[str]]
"""Token ids of each into text of each."""


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


def open_group(
    number: int, prompt: Prompt, requests: Sequence[Request], rollouter: Rollouter
) -> OpenGroup:
    """Attempts at a prompt, one for each of the requests that they begin with; nothing is drawn."""
    episodes = [OpenEpisode(rollouter, prompt, request) for request in requests]
    return OpenGroup(number=number, prompt=prompt, episodes=episodes)


def trajectories_of(
    requests: Sequence[Request], completions: Sequence[Completion]
) -> list[Trajectory]:
    """What was given and sampled in each request."""
    return [
        Trajectory.begin(request.prompt_ids, request.params.temperature).plus(completion)
        for request, completion in zip(requests, completions, strict=True)
    ]


def sample_groups(groups: Sequence[OpenGroup], decode: Decode) -> list[SampleGroup]:
    """Complete groups as samples; `decode` makes text of what was sampled."""
    drawn = [
        (group, i, episode, number)
        for group in groups
        for i, open_episode in enumerate(group.episodes)
        if (episode := open_episode.episode) is not None
        for number in range(len(episode.trajectories))
    ]
    texts = decode([each.trajectories[number].response_ids for _, _, each, number in drawn])
    made = [SampleGroup(prompt=group.prompt, samples=[], number=group.number) for group in groups]
    of_number = {group.number: group for group in made}
    for (group, i, episode, number), text in zip(drawn, texts, strict=True):
        sample = sample_of(group.prompt, i, episode, number, text)
        of_number[group.number].samples.append(sample)
    return made


def require_version(completion: Completion, version: int, *, by_token: bool = False) -> None:
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


class Round(SamplingJob):
    """What `episodes` ask for under the weights of `version`, turn after turn.

    `most`: the tokens that each may sample, one number for all or one each; None: all that it asks for.
    `by_token`: the engine has to say of every token which weights it comes from. Raises EngineError
    where an answer comes from others.
    """

    def __init__(
        self,
        episodes: Sequence[OpenEpisode],
        most: Sequence[int | None] | int | None,
        version: int,
        *,
        by_token: bool = False,
    ):
        left = list(most) if isinstance(most, Sequence) else [most] * len(episodes)
        self._open = list(zip(episodes, left, strict=True))
        super().__init__([episode.request(tokens) for episode, tokens in self._open])
        self._version, self._by_token = version, by_token
        self.num_tokens = 0
        """Tokens sampled so far."""

    def add(self, number: int, completion: Completion) -> Sequence[int]:
        require_version(completion, self._version, by_token=self._by_token)
        super().add(number, completion)
        count = len(completion.response_ids)
        self.num_tokens += count
        episode, most = self._open[number]
        episode.add(completion)
        left = None if most is None else most - count
        if episode.is_complete or left == 0:
            return ()
        self._open.append((episode, left))
        self.requests.append(episode.request(left))
        return (len(self.requests) - 1,)
