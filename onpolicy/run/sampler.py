"""Sampling and scoring of prompts, for rollouts and for evaluation sets."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from onpolicy.chat.template import make_template
from onpolicy.config import TrainConfig
from onpolicy.config.groups import template_options
from onpolicy.errors import AgentError, TrainingError
from onpolicy.models.grammars import require_held
from onpolicy.outputs.samples import FailedAttempt
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.base import SamplingJob
from onpolicy.rollout.curriculum import Curriculum
from onpolicy.rollout.episode_rules import EpisodeRules
from onpolicy.rollout.episodes import Rollouter, SingleTurn
from onpolicy.rollout.evaluation import eval_metrics
from onpolicy.rollout.observations import Observations
from onpolicy.rollout.open_groups import FreeGroups, OpenGroup, OpenGroups, Staleness
from onpolicy.rollout.rounds import Round
from onpolicy.rollout.sampling import greedy, make_group, open_group, sample_groups
from onpolicy.rollout.statistics import rollout_metrics
from onpolicy.run.engines import EnginePair
from onpolicy.run.failed import failed_attempts, failure_metrics
from onpolicy.run.launch.inputs import Inputs
from onpolicy.run.train_samples import has_signal
from onpolicy.trajectory import Trajectory
from onpolicy.types import Request, Sample, SampleGroup, SamplingParams

Metrics = dict[str, float]

Work = Callable[[SamplingJob], object]
"""A function that runs a sampling job."""


@dataclass(slots=True, kw_only=True)
class Rollout:
    """The training data of a step."""

    groups: list[SampleGroup]
    metrics: Metrics

    failed: list[FailedAttempt] = field(default_factory=list)
    """The attempts at episodes that failed since the last rollout."""


def _rollout_of(
    groups: list[SampleGroup],
    metrics: Metrics,
    failed: list[FailedAttempt],
    tokens: float,
    seconds: float,
) -> Rollout:
    """Return the rollout of groups, with `metrics` and their own; `tokens` were sampled in `seconds`.
    Raises AgentError if all episodes have failed."""
    if not any(group.samples for group in groups):
        first = f" (the first {failed[0].message:.200})" if failed else ""
        raise AgentError(
            f"--episode-failures: all episodes of a rollout have failed{first}. Mend the "
            "function that rolls them out; a run that goes on from a checkpoint has those that failed "
            "after it fail again, unless observations.jsonl is removed from its --run-dir.",
            reason="all",
        )
    speed = tokens / seconds if seconds else 0.0
    drawing = {"perf/rollout_tokens_per_second": speed}
    metrics = {**rollout_metrics(groups), **metrics, **drawing}
    return Rollout(groups=groups, metrics=metrics, failed=failed)


class Sampler:
    """The maker of samples, which asks the engines for responses and the scorer for rewards."""

    def __init__(
        self,
        config: TrainConfig,
        inputs: Inputs,
        engines: EnginePair,
        scorer: Scorer,
        on_requests: Callable[[int], None],
        rollouter: Rollouter,
        observations: Path,
    ):
        self.config, self.inputs, self.engines = config, inputs, engines
        self._scorer, self.on_requests = scorer, on_requests
        replayed = inputs.replayed
        repeated = None if replayed is None else Path(replayed.file).with_name(observations.name)
        self._rollouter, self.observations = rollouter, Observations(observations, repeated)
        agent = config.agent
        self._rules = EpisodeRules(
            max_context_len=inputs.max_context_len(config),
            time_limit=agent.episode_time_limit,
            on_failure=agent.episode_failures,
            is_repeated=replayed is not None,
            observations=self.observations,
            decode=lambda token_ids: str(inputs.tokenizer.decode(token_ids)),
            tokens_of=self._tokens_of,
            require_grammar=lambda grammar: require_held(grammar, engines.contract),
        )
        self.curriculum = Curriculum(inputs.prompts, config.data)
        self.open = self._open_groups()
        self.ready: list[SampleGroup] = []
        """The groups that are complete and scored, but not trained on, the oldest first."""

        self._failed: list[FailedAttempt] = []
        """The failed attempts in groups that were completed since the last rollout."""

        self._evaluated: list[OpenGroup] = []
        """The groups of an evaluation in progress."""

    def _tokens_of(self, more: Any, so_far: Trajectory) -> list[int]:
        """Return the tokens of a text, of token ids or of chat messages that are appended to an episode.
        Raises ValueError for anything else, and for messages that do not follow an answer."""
        if isinstance(more, str):
            encode = self.inputs.tokenizer.encode
            return list(encode(more, add_special_tokens=False))
        if all(isinstance(token, int) for token in more):
            return [*more]
        if not all(isinstance(message, Mapping) for message in more):
            raise ValueError(f"append({more!r:.80}): must be a text, token ids or chat messages")
        if not so_far.sampled[-1]:
            raise ValueError(
                "append: chat messages come after an answer, all at once; append text or token ids here"
            )
        template = make_template(
            self.inputs.tokenizer,
            self.inputs.stop_token_ids,
            options=template_options(self.config.data.chat_template_kwargs),
        )
        return template.after_answer(so_far.token_ids, more)

    def _open_groups(self) -> OpenGroups:
        rollout = self.config.rollout
        width = self.config.open_groups * self.config.answers_per_prompt
        if rollout.rollout_schedule != "free":
            return OpenGroups(self.open_group, width)
        size = rollout.rollout_batch_size
        staleness = Staleness(most=rollout.max_staleness, batch=size)
        return FreeGroups(self.open_group, width, staleness, rollout.num_rollout * size)

    def finish(self, complete: Sequence[OpenGroup], tokens: int, seconds: float) -> Rollout:
        """Return the rollout of complete groups, in their order: scored, and nothing left out. tokens,
        seconds: the number of tokens sampled since the last rollout, and the time for them."""
        groups, metrics = self._scored(complete)
        self._failed = failed_attempts(complete)
        return _rollout_of(groups, metrics, self._failed, tokens, seconds)

    def roll_out(self, step: int, version: int, work: Work) -> Rollout:
        """Sample the groups of a step, in rounds until enough are complete; the oldest ones are taken.
        Raises EngineError for a token that was not sampled from the weights of `version`, and
        TrainingError if too many groups in a row are without a signal."""
        self.curriculum.begin(step, version)
        self._failed = []
        wanted, found = self.config.rollout.rollout_batch_size, defaultdict[str, float](float)
        # Each round samples every open group further; complete ones are scored and kept.
        while len(self.ready) < wanted:
            self._draw_round(version, work, found)
            self._require_signal(step, found["rollout/num_resampled_groups"])
        groups, self.ready = self.ready[:wanted], self.ready[wanted:]
        if self.ready and not self.config.rollout.rollout_segment_tokens:
            found["rollout/num_surplus_groups"] += len(self.ready)
            self.ready = []  # a step's samples all have one version
        tokens, seconds = found.pop("tokens", 0.0), found.pop("seconds", 0.0)
        return _rollout_of(groups, found, self._failed, tokens, seconds)

    def _draw_round(self, version: int, work: Work, found: Metrics) -> None:
        started = time.perf_counter()
        episodes, most = self.open.next_round(), self.config.rollout.rollout_segment_tokens or None
        drawn = Round(episodes, most, version, by_token=self.config.plan.may_lag)
        self.on_requests(len(episodes))
        work(drawn)
        found["tokens"] += drawn.num_tokens
        found["seconds"] += time.perf_counter() - started
        complete = self.open.take_complete()
        self._failed += failed_attempts(complete)
        for name, value in self._make_ready(complete).items():
            found[name] += value

    def _make_ready(self, complete: Sequence[OpenGroup]) -> Metrics:
        """Score groups, and keep those whose rewards differ (--dynamic-sampling)."""
        if not complete:
            return {}
        groups, metrics = self._scored(complete)
        self.curriculum.measure(groups)
        if self.config.rollout.dynamic_sampling:
            found = len(groups)
            groups = [group for group in groups if has_signal(group)]
            metrics["rollout/num_resampled_groups"] = float(found - len(groups))
        self.ready = sorted([*self.ready, *groups], key=lambda group: group.number)
        return metrics

    def _scored(self, complete: Sequence[OpenGroup]) -> tuple[list[SampleGroup], Metrics]:
        decode = partial(self.inputs.tokenizer.batch_decode, skip_special_tokens=True)
        groups = sample_groups(complete, decode)
        unrewarded = [[s for s in group.samples if not s.is_rewarded] for group in groups]
        metrics = self._scorer.score([*unrewarded, *([g.greedy] for g in groups if g.greedy)])
        for group in groups:
            if group.samples:
                self._rollouter.finish_group(group)
        if not isinstance(self._rollouter, SingleTurn):
            metrics |= failure_metrics(failed_attempts(complete))
        self.observations.forget(group.number for group in groups)
        return groups, metrics

    def _require_signal(self, step: int, num_dropped: float) -> None:
        rollout = self.config.rollout
        most = rollout.dynamic_sampling_limit * rollout.rollout_batch_size
        if num_dropped > most:
            raise TrainingError(
                f"--dynamic-sampling-limit={rollout.dynamic_sampling_limit}: for rollout {step} "
                f"{num_dropped:.0f} groups were drawn whose rewards are all equal, and the limit is "
                f"{most}: the prompts are too easy or too hard by now. Choose others, raise the limit, "
                "or train on what there is with --filter-equal-rewards instead of --dynamic-sampling."
            )

    def open_group(self, number: int) -> OpenGroup:
        """Return the group for the prompt at position `number`; nothing of it is sampled yet."""
        rollout, prompt = self.config.rollout, self.curriculum.at(number)
        params = self._params(rollout.rollout_temperature, rollout.rollout_max_response_len)
        params = replace(
            params,
            return_routed_experts=self.engines.replays_routing,
            return_entropy=self.engines.tells_entropy,
        )
        seed_key = (self.config.seed, "rollout", *divmod(number, rollout.rollout_batch_size))
        requests = make_group(prompt, self.config.answers_per_prompt, params, *seed_key)
        if self.config.compares_with_greedy:
            requests[-1] = greedy(requests[-1])
        group = open_group(number, prompt, requests, self._rollouter, self._rules)
        return replace(group, has_greedy=self.config.compares_with_greedy)

    def request_of(self, sample: Sample, groups: Sequence[SampleGroup]) -> Request:
        """Return the first request of the episode that a sample of some groups belongs to."""
        group = next(g for g in groups if any(s is sample for s in g.samples))
        return self.open_group(group.number).episodes[sample.sample_index].turns.request

    def evaluate(self, name: str) -> tuple[list[SampleGroup], Metrics, list[FailedAttempt]]:
        """Sample and score one evaluation set; return its groups, metrics and failed attempts. Other
        sets do not change its samples."""
        settings, prompts = self.inputs.eval_sets[name]
        params = self._params(settings.temperature, settings.max_response_len)
        params = replace(params, top_p=settings.top_p, top_k=settings.top_k)
        count = settings.n_samples_per_eval_prompt
        seed_key = ["eval", name] if name else ["eval"]
        rules = replace(self._rules, observations=Observations(), is_repeated=False)
        self._evaluated = drawn = [
            open_group(
                position,
                prompt,
                make_group(prompt, count, params, self.config.seed, *seed_key, position),
                self._rollouter,
                rules,
            )
            for position, prompt in enumerate(prompts)
        ]
        episodes = [episode for group in drawn for episode in group.episodes]
        self.on_requests(len(episodes))
        try:
            self.engines.work(Round(episodes, None, self.engines.weight_version))
        finally:
            _end(drawn)
        groups, found = self._scored(drawn)
        self._evaluated, failed = [], failed_attempts(drawn)
        num_failed = found.get("rollout/num_failed_episodes")
        return groups, eval_metrics(groups, count, name, num_failed), failed

    def failed_so_far(self) -> list[FailedAttempt]:
        """Return failed attempts of the evaluation in progress, else since the last rollout."""
        if self._evaluated:
            return failed_attempts(self._evaluated)
        return [*self._failed, *failed_attempts(self.open.groups)]

    def close(self) -> None:
        """End the episodes in progress, and close the rollouter."""
        _end(self.open.groups)
        self._rollouter.close()

    def _params(self, temperature: float, max_new_tokens: int) -> SamplingParams:
        rollout = self.config.rollout
        return SamplingParams(
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            stop_token_ids=self.inputs.stop_token_ids,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            min_p=rollout.rollout_min_p,
        )


def _end(groups: Sequence[OpenGroup]) -> None:
    for group in groups:
        for episode in group.episodes:
            episode.end()
