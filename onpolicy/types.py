"""The records of a run, of plain Python values and arrays, so that any process can hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import mean
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge
from pydantic import Field, model_validator

from onpolicy.images.placed import PlacedImage
from onpolicy.system.number_arrays import Ints
from onpolicy.system.records import Count, written_as
from onpolicy.trajectory import FinishReason, Grammar, Trajectory

Term = Literal["objective", "kl_loss", "opd_kl", "entropy"]
"""A term of the policy's loss: the objective, or another with a coefficient flag of its own:
--kl-loss-coef, --opd-kl-coef or --entropy-coef."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Prompt:
    """One row of a prompt file."""

    index: int
    """Position among the file's prompts, after duplicates are dropped. Example: 12"""

    prompt_ids: list[int]
    """The prompt's tokens, chat template applied. Example: [17, 4, 9]"""

    label: str
    """Reference answer. Example: '42'"""

    text: str
    """The prompt's text, as tokenised, but with one token for each image. Example: '6 * 7 ='"""

    metadata: dict[str, Any] = field(default_factory=dict)
    """The row's other fields."""

    messages: list[dict[str, Any]] | None = None
    """Messages that the chat template was applied to, with images as data URLs in OpenAI's form, so that
    clients can send them; None: the prompt was text."""

    images: tuple[PlacedImage, ...] = ()
    """Images among the prompt's tokens, in order."""

    rule: str = ""
    """Rule or service that scores its responses, by name; empty: `rewards`, or the run's own reward."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Weights of the rules (by name) and functions (by path) whose sum scores its responses."""

    @property
    def token_ids(self) -> list[int]:
        """Return `prompt_ids`, under the former name that reward functions may use."""
        return self.prompt_ids


def _prompt_at(index: int, prompts: Sequence[Prompt]) -> Prompt:
    if index >= len(prompts):
        raise ValueError(f"prompt={index}: there are {len(prompts)}")
    return prompts[index]


ChosenPrompt = Annotated[Prompt, written_as(Count, lambda prompt: prompt.index, _prompt_at)]
"""A prompt that records name by its index; they are read with the run's prompts as the context."""


@dataclass(slots=True, kw_only=True, frozen=True)
class SamplingParams:
    """Sampling settings of a response."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    ignore_eos: bool = False

    stop: tuple[str, ...] = ()
    """Texts that end a response; their tokens are part of it."""

    return_routed_experts: bool = False
    """Whether the engine reports the experts that computed every token."""

    grammar: Grammar | None = None
    """Grammar of the response; it is applied before all other filters."""

    num_likeliest: int = 0
    """Number of likeliest tokens that the engine returns with each sampled one."""

    @property
    def is_cut(self) -> bool:
        """Return whether tokens are drawn from a part of the vocabulary; greedy sampling is no cut."""
        filters = (self.top_p, self.top_k, self.min_p)
        is_filtered = filters != (1.0, -1, 0.0) and self.top_k != 1
        return is_filtered or self.grammar is not None


@dataclass(slots=True, kw_only=True, frozen=True)
class Request:
    """A response to sample. Two requests with equal fields give the same response, bit for bit."""

    prompt_ids: Sequence[int]
    sampling_seed: int
    params: SamplingParams

    images: tuple[PlacedImage, ...] = ()
    """Images among the tokens of `prompt_ids`, in order."""

    num_begun: int = 0
    """Number of last tokens of `prompt_ids` that begin the response and were sampled before; its
    grammar continues after them."""


@dataclass(slots=True, kw_only=True, frozen=True)
class LearntTokens:
    """Advantages and weights that the R sampled tokens of a trajectory had in training."""

    advantages: list[float]
    """Advantages, [R], after the penalty of a correction."""

    weights: list[float]
    """Factor of each token's policy loss, [R], from corrections and its own weight: 1 without any, 0
    for a rejected token. Corrections by the user's own function are not part of it."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """A prompt, a trajectory of an episode that answers it, and its results."""

    prompt: ChosenPrompt

    sample_index: Count
    """Index of the episode within its prompt, 0 .. n_samples_per_prompt - 1; shared by all its
    trajectories."""

    trajectory: Trajectory

    number: int = 0
    """Index among the trajectories of the episode."""

    response: str = ""
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Further numbers that a reward function returned; logged under their names."""

    answer: str | None = None
    """Answer that the reward function extracted, for voting; empty: none found; None: not reported."""

    has_failed: bool = False
    """Whether scoring failed: the reward is NaN then, and nothing may compute with it."""

    is_rewarded: bool = False
    """Whether the episode gave its reward itself, so that no reward function is called."""

    seeds: Sequence[tuple[Count, Count]] = ()
    """(seed of a request, number of its tokens) for its R tokens in order; empty if unknown."""

    token_rewards: list[float] | None = None
    """Rewards of its sampled tokens, [R], if the episode gave them; `reward` is their sum."""

    token_weights: dict[Term, list[Annotated[float, Ge(0)]]] = field(default_factory=dict)
    """Weights of its sampled tokens by term of the loss, [R], if an episode or a reward gave them."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that the episode reported; shared by all its trajectories."""

    info: dict[str, Any] = field(default_factory=dict)
    """JSON-compatible data of the episode for later inspection; shared by all its trajectories."""

    mismatched_tokens: int | None = None
    """Number of tokens whose log-probability differs in training; None if not compared."""

    is_shown: bool = False
    """Whether it is displayed, so that training reports on its tokens."""

    learnt: LearntTokens | None = None

    # Its place in the rollout that is trained on, and what is known there alone.

    group: Annotated[int, Field(exclude=True)] = 0
    """Number of its prompt's group; samples of a group are adjacent."""

    episode: Annotated[int, Field(exclude=True)] = 0
    """Number of its episode in the rollout; trajectories of an episode are adjacent."""

    policy_version: Annotated[int | None, Field(exclude=True)] = None
    """Version of the policy that trains on it; None: the one that it was sampled from."""

    teacher_log_probs: Annotated[list[float] | None, Field(exclude=True)] = None
    """A teacher server's log-probabilities of its sampled tokens, [R]; None: not asked."""

    teacher_top: Annotated[
        tuple[list[list[int]], list[list[float]]] | None, Field(exclude=True)
    ] = None
    """The teacher's top-k tokens and their log-probabilities, [R, k] each, for a loss."""

    @model_validator(mode="after")
    def _require_possible(self) -> Sample:
        """Raise ValueError for a record whose numbers do not belong to its tokens."""
        count = self.trajectory.num_sampled
        for name, numbers in [("token_rewards", self.token_rewards), *self.token_weights.items()]:
            if numbers is not None and len(numbers) != count:
                raise ValueError(f"{name}={len(numbers)} numbers: {count} tokens are sampled")
        if math.isnan(self.reward) != self.has_failed:
            raise ValueError(f"reward={self.reward}: only a sample that was not scored has NaN")
        return self

    @property
    def name(self) -> str:
        """Return a name for messages: 'prompt 12, sample 3', or 'prompt 12, sample 3, trajectory 1'"""
        name = f"prompt {self.prompt.index}, sample {self.sample_index}"
        return f"{name}, trajectory {self.number}" if self.number else name

    @property
    def token_ids(self) -> list[int]:
        """Return all tokens, given and sampled."""
        return self.trajectory.token_ids.tolist()

    @property
    def lags(self) -> Ints:
        """Return the staleness of each sampled token, [R]: the number of pushes between the policy that
        it was sampled from and the one that trains on it."""
        spans, version = self.trajectory.spans, self.policy_version
        if version is None:
            return Ints(np.zeros(self.trajectory.num_sampled, np.int32))
        lags = Ints([version - span.version for span in spans])
        return Ints(np.repeat(lags, Ints([span.end - span.start for span in spans])))

    # Fields of the trajectory that reward functions read (docs/rewards.md), as does other code.

    @property
    def response_ids(self) -> list[int]:
        return self.trajectory.response_ids.tolist()

    @property
    def rollout_log_probs(self) -> list[float]:
        return self.trajectory.rollout_log_probs.tolist()

    @property
    def finish_reason(self) -> FinishReason:
        return self.trajectory.finish_reason

    @property
    def weight_version(self) -> int:
        return self.trajectory.weight_version

    @property
    def num_cached_tokens(self) -> int:
        return self.trajectory.num_cached_tokens


BranchKey = tuple[str, ...]
"""Keys of the forks that lead to a branch of an episode; empty for its first."""

Spans = list[tuple[int, int]]
"""(version, number of tokens) in order."""


@dataclass(slots=True, kw_only=True)
class SampleGroup:
    """The samples of one prompt in one rollout."""

    prompt: ChosenPrompt
    samples: list[Sample]

    number: Count = 0
    """Position of the prompt in the endless order of a run's prompts."""

    branches: Annotated[list[dict[BranchKey, Spans]], Field(exclude=True)] = field(
        default_factory=list
    )
    """Versions that the branches of each episode sampled from; empty for a failed episode."""

    @model_validator(mode="after")
    def _require_one_prompt(self) -> SampleGroup:
        """Raise ValueError for a record of samples of other prompts."""
        for sample in self.samples:
            if sample.prompt is not self.prompt:
                raise ValueError(f"prompt={sample.prompt.index}: its group has {self.prompt.index}")
        return self

    @property
    def episodes(self) -> list[list[Sample]]:
        """Return the samples of each episode; a failed episode may be missing."""
        return [list(each) for _, each in groupby(self.samples, key=lambda s: s.sample_index)]

    @property
    def scored_episodes(self) -> list[list[Sample]]:
        """Return the episodes with a reward; one failed trajectory excludes its whole episode."""
        return [each for each in self.episodes if not any(sample.has_failed for sample in each)]

    @property
    def rewards(self) -> list[float]:
        """Return each scored episode's reward: the mean of its trajectories' rewards, rounded once."""
        return [mean(sample.reward for sample in episode) for episode in self.scored_episodes]


@dataclass(slots=True, kw_only=True, frozen=True)
class ParityFindings:
    """Results of the comparison with the rollout, for the samples of a training step."""

    mismatched_tokens: Sequence[int | None]
    """Number of tokens of each sample that differed; None if it was not compared."""

    apart: tuple[int, Sequence[float]] | None = None
    """The first sample with a token that differed, where the comparison failed, and the trainer's
    log-probabilities of its sampled tokens, [R]."""


@dataclass(slots=True, kw_only=True, frozen=True)
class TrainOutcome:
    """The results of training on a rollout."""

    metrics: dict[str, float]
    """Metrics, equal on all ranks."""

    findings: ParityFindings

    learnt: Mapping[int, LearntTokens] = field(default_factory=dict)
    """Part that the shown samples had in training, by their numbers in the rollout."""
