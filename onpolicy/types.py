"""The nouns of a run. Plain records of plain Python values, so that any process can hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import mean
from typing import Any, Literal

from onpolicy.grammar import Grammar
from onpolicy.trajectory import FinishReason, Trajectory

Term = Literal["objective", "kl_loss", "opd_kl", "entropy", "log_ratio", "positive_nll"]
"""A term of the policy's loss: the objective, or one beside it by its coefficient's flag, which is
--kl-loss-coef, --opd-kl-coef, --entropy-coef, --log-ratio-coef or --positive-nll-coef."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Prompt:
    """One row of a prompt file."""

    index: int
    """Position among the file's prompts, after duplicates were dropped. Example: 12"""

    prompt_ids: list[int]
    """The prompt's tokens, chat template applied. Example: [17, 4, 9]"""

    label: str
    """Reference answer. Example: '42'"""

    text: str
    """The prompt as it was tokenised. Example: '6 * 7 ='"""

    metadata: dict[str, Any] = field(default_factory=dict)
    """The row's other fields."""

    messages: list[dict[str, Any]] | None = None
    """What the chat template was applied to; None: it was text."""

    rule: str = ""
    """What scores its responses, a rule or a service by its name; empty: `rewards`, or else what scores
    the run's."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """What scores its responses as a weighted sum: rules by name and functions by path, and the weight
    of each."""

    @property
    def token_ids(self) -> list[int]:
        """`prompt_ids`, by the name that reward functions knew before."""
        return self.prompt_ids


@dataclass(slots=True, kw_only=True, frozen=True)
class SamplingParams:
    """How a response is sampled."""

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
    """Whether the engine is to tell which experts computed every token."""

    return_entropy: bool = False
    """Whether it is to tell the entropy of the distribution that each token is drawn from, which engines
    under an aligned contract can."""

    grammar: Grammar | None = None
    """What the response must be as text, which is cut before all filters."""

    @property
    def is_cut(self) -> bool:
        """Whether a token may be drawn from fewer than all; a greedy one is the likeliest of all."""
        filters = (self.top_p, self.top_k, self.min_p)
        is_filtered = filters != (1.0, -1, 0.0) and self.top_k != 1
        return is_filtered or self.grammar is not None


@dataclass(slots=True, kw_only=True, frozen=True)
class Request:
    """One response to sample. Two requests with equal fields give the same response, bit for bit."""

    prompt_ids: list[int]
    sampling_seed: int
    params: SamplingParams

    num_begun: int = 0
    """The last tokens of `prompt_ids` that are the beginning of the response, sampled before: its
    grammar goes on after them."""


@dataclass(slots=True, kw_only=True, frozen=True)
class LearntTokens:
    """What the R sampled tokens of a trajectory counted for in training."""

    advantages: list[float]
    """[R]: after a penalty of a correction."""

    weights: list[float]
    """[R]: the factor of a token's policy loss, by corrections and by its own weight: 1 without any, 0
    where it was rejected. A correction of the user's own is not part of it."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """A prompt, a trajectory of an episode that answers it, and what became of it."""

    prompt: Prompt

    sample_index: int
    """The episode's place among those of its prompt, 0 .. n_samples_per_prompt - 1; all trajectories of
    the episode have it."""

    trajectory: Trajectory

    number: int = 0
    """Its place among the trajectories of the episode."""

    is_greedy: bool = False
    """Whether it is the answer that its group is compared with, of which nothing is learnt."""

    response: str = ""
    """What was sampled, as text."""

    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Further numbers a reward function returned; logged under their names."""

    answer: str | None = None
    """What the reward function read, to vote by; empty: it found nothing, None: it does not say."""

    has_failed: bool = False
    """Whether it could not be scored: its reward is NaN then, which nothing may compute with."""

    is_rewarded: bool = False
    """Whether the episode said its reward itself, so that no reward function is asked."""

    seeds: Sequence[tuple[int, int]] = ()
    """(request's seed, number of its tokens) for its R tokens in order; empty where it is not known."""

    token_rewards: list[float] | None = None
    """[R]: the rewards of its sampled tokens, if the episode said them; `reward` is their sum."""

    token_weights: dict[Term, list[float]] = field(default_factory=dict)
    """[R]: factors of a term of the loss at its sampled tokens, if the episode or a reward said them."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that the episode said of itself; all its trajectories have them."""

    info: dict[str, Any] = field(default_factory=dict)
    """What is to be seen of the episode later, as JSON can say it; all its trajectories have it."""

    mismatched_tokens: int | None = None
    """Tokens with another log-probability in training; None while they were not compared."""

    is_shown: bool = False
    """Whether it is one of those that people are shown, so that training is to tell of its tokens."""

    learnt: LearntTokens | None = None
    """What its tokens counted for in training, if it is shown and was trained on."""

    @property
    def name(self) -> str:
        """For messages. Example: 'prompt 12, sample 3', or 'prompt 12, sample 3, trajectory 1'"""
        name = f"prompt {self.prompt.index}, sample {self.sample_index}"
        return f"{name}, trajectory {self.number}" if self.number else name

    @property
    def token_ids(self) -> list[int]:
        """Given and sampled."""
        return self.trajectory.token_ids

    # What reward functions read of the trajectory (docs/rewards.md), and most others too.

    @property
    def response_ids(self) -> list[int]:
        return self.trajectory.response_ids

    @property
    def rollout_log_probs(self) -> list[float]:
        return self.trajectory.rollout_log_probs

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
"""The keys of the forks that lead to a branch of an episode; none for its first."""

Spans = list[tuple[int, int]]
"""(version, tokens) in their order."""


@dataclass(slots=True, kw_only=True)
class SampleGroup:
    """All samples of one prompt in one rollout."""

    prompt: Prompt
    samples: list[Sample]

    number: int = 0
    """Position of the prompt in the endless order of a run's prompts."""

    greedy: Sample | None = None
    """The answer that they are compared with; None where the estimator needs none."""

    branches: list[dict[BranchKey, Spans]] = field(default_factory=list)
    """What the branches of each episode sampled from which versions; nothing of one that failed."""

    @property
    def episodes(self) -> list[list[Sample]]:
        """The samples of each episode that is there; one that failed may be missing."""
        return [list(each) for _, each in groupby(self.samples, key=lambda s: s.sample_index)]

    @property
    def scored_episodes(self) -> list[list[Sample]]:
        """The episodes that have a reward: an episode of which one trajectory has none has none."""
        return [each for each in self.episodes if not any(sample.has_failed for sample in each)]

    @property
    def rewards(self) -> list[float]:
        """A reward of each scored episode: the mean of its trajectories' rewards, rounded once."""
        return [mean(sample.reward for sample in episode) for episode in self.scored_episodes]


@dataclass(slots=True, kw_only=True, frozen=True)
class TrainSample:
    """A sample to learn from."""

    sample: Sample

    group: int
    """The samples of one prompt have one number, and stand together."""

    episode: int
    """The trajectories of one episode have one number in the rollout, and stand together."""

    policy_version: int | None = None
    """The version of the policy that learns from it; None: the one that it was sampled from."""

    baseline: float | None = None
    """The reward of its group's greedy answer; None without one."""

    teacher_log_probs: list[float] | None = None
    """[R]: what a teacher behind a URL gives its sampled tokens; None: it was not asked."""

    teacher_top: tuple[list[list[int]], list[list[float]]] | None = None
    """[R, k] twice: the tokens that it finds likeliest, and their log-probabilities; for a loss."""

    @property
    def lags(self) -> list[int]:
        """[R]: the pushes between the policy that each token was sampled from and the one that learns
        from it."""
        spans, version = self.sample.trajectory.spans, self.policy_version
        if version is None:
            return [0] * self.sample.trajectory.num_sampled
        return [version - span.version for span in spans for _ in range(span.start, span.end)]


@dataclass(slots=True, kw_only=True, frozen=True)
class ParityFindings:
    """What the comparison with the rollout found in the samples of a training step."""

    mismatched_tokens: Sequence[int | None]
    """How many tokens of each sample differed; None if it was not compared."""

    apart: tuple[int, Sequence[float]] | None = None
    """Where the comparison failed: the first sample of which a token differed, and the trainer's
    log-probabilities of its sampled tokens, [R]."""


@dataclass(slots=True, kw_only=True, frozen=True)
class TrainOutcome:
    """What came of training on a rollout."""

    metrics: dict[str, float]
    """Equal on all ranks."""

    findings: ParityFindings

    learnt: Mapping[int, LearntTokens] = field(default_factory=dict)
    """What was learnt of the samples that are shown, by their numbers in the rollout."""
