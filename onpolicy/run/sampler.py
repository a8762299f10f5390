"""Sampling and scoring of prompts, for rollouts and for evaluation sets.

Failed attempts at episodes are counted in the metrics, and kept as records for the sample log.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from onpolicy.chat.messages import images_of, seen
from onpolicy.chat.template import make_template
from onpolicy.config import TrainConfig
from onpolicy.config.groups import template_options
from onpolicy.errors import AgentError, TrainingError
from onpolicy.images.placed import PlacedImage
from onpolicy.images.placing import SeenImage
from onpolicy.outputs.samples import FailedAttempt
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.base import SamplingJob
from onpolicy.rollout.episode_jobs import EpisodesJob
from onpolicy.rollout.observations import Observations
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.open_groups import FreeGroups, OpenGroups, Staleness
from onpolicy.rollout.prompt_order import Curriculum
from onpolicy.rollout.rollouter import Rollouter, SingleTurn
from onpolicy.rollout.sample_requests import make_group, open_group, sample_groups
from onpolicy.rollout.statistics import eval_metrics, rollout_metrics
from onpolicy.rollout.turns import EpisodeRules
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.engine_specs import replays_routing
from onpolicy.run.launch.inputs import Inputs
from onpolicy.run.train_samples import has_signal
from onpolicy.trajectory import Trajectory
from onpolicy.types import Request, Sample, SampleGroup

Metrics = dict[str, float]

Drawn = tuple[list[SampleGroup], Metrics, list[FailedAttempt]]
"""Groups that were sampled and scored, their metrics, and the failed attempts at their episodes."""

MOST_RESAMPLED = 10
"""Groups without a signal, for each that a rollout needs, after which the run ends."""

Work = Callable[[SamplingJob], object]

Groups = Sequence[Sequence[OpenEpisode]]
"""Groups as in `OpenGroups`: the attempts at each of several prompts."""


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
            holds_grammars=lambda: engines.contract.is_aligned,
        )
        self.curriculum = Curriculum(inputs.prompts, config.data)
        self.open = self._open_groups()
        self._failed: list[FailedAttempt] = []
        """The failed attempts in groups that were completed since the last rollout."""

        self._evaluated: Groups = ()

    def _tokens_of(self, more: Any, so_far: Trajectory) -> tuple[list[int], Sequence[PlacedImage]]:
        """Return the tokens of a text, of token ids or of chat messages that are appended to an episode,
        with the places of the messages' images. Raises ValueError for anything else, and for messages
        that do not follow an answer."""
        placer, images = self.inputs.placer, list[SeenImage]()
        if isinstance(more, str):
            token_ids = list(self.inputs.tokenizer.encode(more, add_special_tokens=False))
        elif all(isinstance(token, int) for token in more):
            token_ids = [*more]
        elif not all(isinstance(message, Mapping) for message in more):
            raise ValueError(f"append({more!r:.80}): must be a text, token ids or chat messages")
        elif not so_far.sampled[-1]:
            raise ValueError(
                "append: chat messages come after an answer, all at once; append text or token ids here"
            )
        else:
            see = placer.see if placer else None
            messages = [{**each, "content": seen(each.get("content"), see)} for each in more]
            template = make_template(
                self.inputs.tokenizer,
                self.inputs.stop_token_ids,
                options=template_options(self.config.data.chat_template_kwargs),
                placer=placer,
            )
            images = images_of(messages)
            token_ids = template.after_answer(so_far.token_ids, messages)
        start = len(so_far.token_ids)
        return token_ids, placer.placed(token_ids, images, start) if placer else ()

    def _open_groups(self) -> OpenGroups:
        rollout = self.config.rollout
        width = self.config.open_groups * rollout.n_samples_per_prompt
        if rollout.rollout_schedule != "free":
            return OpenGroups(self.open_group)
        size = rollout.rollout_batch_size
        staleness = Staleness(most=rollout.max_staleness, batch=size)
        return FreeGroups(self.open_group, width, staleness, rollout.num_rollout * size)

    def finish(self, complete: Groups, tokens: int, seconds: float) -> Drawn:
        """Return the rollout of complete groups, in their order: scored, and nothing left out. tokens,
        seconds: the number of tokens sampled since the last rollout, and the time for them."""
        groups, metrics = self._scored(complete)
        self._failed = failed_attempts(complete)
        return _rollout_of(groups, metrics, self._failed, tokens, seconds)

    def roll_out(self, step: int, version: int, work: Work) -> Drawn:
        """Return the rollout of a step: its groups, sampled under `version` and scored. With
        --dynamic-sampling others are sampled until enough have a signal. Raises EngineError for a
        token of other weights, and TrainingError if too many groups are without a signal."""
        self.curriculum.begin(step, version)
        self._failed = []
        wanted, found = self.config.rollout.rollout_batch_size, defaultdict[str, float](float)
        groups: list[SampleGroup] = []
        while len(groups) < wanted:
            groups += self._draw(version, work, found)
            self._require_signal(step, found["rollout/num_resampled_groups"])
        if surplus := len(groups) - wanted:
            found["rollout/num_surplus_groups"] += surplus
        tokens, seconds = found.pop("tokens", 0.0), found.pop("seconds", 0.0)
        return _rollout_of(groups[:wanted], found, self._failed, tokens, seconds)

    def _draw(self, version: int, work: Work, found: Metrics) -> list[SampleGroup]:
        """Return the next groups, sampled and scored; add what was found to `found`."""
        started = time.perf_counter()
        opened = [self.open.open_next() for _ in range(self.config.open_groups)]
        job = self._job_of(opened, version)
        work(job)
        found["tokens"] += job.num_tokens
        found["seconds"] += time.perf_counter() - started
        complete = self.open.take_all()
        self._failed += failed_attempts(complete)
        groups, metrics = self._scored(complete)
        self.curriculum.measure(groups)
        if self.config.rollout.dynamic_sampling:
            count = len(groups)
            groups = [group for group in groups if has_signal(group)]
            metrics["rollout/num_resampled_groups"] = float(count - len(groups))
        for name, value in metrics.items():
            found[name] += value
        return groups

    def _job_of(self, groups: Groups, version: int) -> EpisodesJob:
        """Return the job that samples whole groups under the weights of `version`."""
        episodes = [*chain.from_iterable(groups)]
        self.on_requests(len(episodes))
        job = EpisodesJob(version, by_token=self.config.plan.may_lag)
        job.begin(episodes)
        return job

    def _scored(self, complete: Groups) -> tuple[list[SampleGroup], Metrics]:
        decode = partial(self.inputs.tokenizer.batch_decode, skip_special_tokens=True)
        groups = sample_groups(complete, decode)
        unrewarded = [[s for s in group.samples if not s.is_rewarded] for group in groups]
        metrics = self._scorer.score(unrewarded)
        for group in groups:
            if group.samples:
                self._rollouter.finish_group(group)
        if not isinstance(self._rollouter, SingleTurn):
            metrics |= failure_metrics(failed_attempts(complete))
        self.observations.forget(group.number for group in groups)
        return groups, metrics

    def _require_signal(self, step: int, num_dropped: float) -> None:
        rollout = self.config.rollout
        most = MOST_RESAMPLED * rollout.rollout_batch_size
        if num_dropped > most:
            raise TrainingError(
                f"--dynamic-sampling: for rollout {step} {num_dropped:.0f} groups were drawn whose "
                f"rewards are all equal, and the limit is {most}: the prompts are too easy or too hard "
                "by now. Choose others, or train on what there is with --filter-equal-rewards instead."
            )

    def open_group(self, number: int) -> list[OpenEpisode]:
        """Return the group for the prompt at position `number`; nothing of it is sampled yet."""
        rollout, prompt = self.config.rollout, self.curriculum.at(number)
        params = self.inputs.params(rollout, rollout.rollout_max_response_len)
        replays = replays_routing(self.config, self.engines.contract)
        likeliest = self.config.num_likeliest
        params = replace(params, return_routed_experts=replays, num_likeliest=likeliest)
        seed_key = (self.config.seed, "rollout", *divmod(number, rollout.rollout_batch_size))
        requests = make_group(prompt, rollout.n_samples_per_prompt, params, *seed_key)
        return open_group(number, prompt, requests, self._rollouter, self._rules)

    def request_of(self, sample: Sample, groups: Sequence[SampleGroup]) -> Request:
        """Return the first request of the episode that a sample of some groups belongs to."""
        group = next(g for g in groups if any(s is sample for s in g.samples))
        return self.open_group(group.number)[sample.sample_index].turns.request

    def evaluate(self, name: str) -> Drawn:
        """Sample and score one evaluation set. Other sets do not change its samples."""
        settings, prompts = self.inputs.eval_sets[name]
        params = replace(
            self.inputs.params(self.config.rollout, settings.max_response_len),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
        )
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
        try:
            self.engines.work(self._job_of(drawn, self.engines.weight_version))
        finally:
            _end(drawn)
        groups, found = self._scored(drawn)
        self._evaluated, failed = (), failed_attempts(drawn)
        num_failed = found.get("rollout/num_failed_episodes")
        return groups, eval_metrics(groups, count, name, num_failed), failed

    def failed_so_far(self) -> list[FailedAttempt]:
        """Return failed attempts of the evaluation in progress, else since the last rollout."""
        if self._evaluated:
            return failed_attempts(self._evaluated)
        return [*self._failed, *failed_attempts([*self.open.groups.values()])]

    def close(self) -> None:
        """End the episodes in progress, and close the rollouter."""
        _end([*self.open.groups.values()])
        self._rollouter.close()


def _rollout_of(
    groups: list[SampleGroup],
    metrics: Metrics,
    failed: list[FailedAttempt],
    tokens: float,
    seconds: float,
) -> Drawn:
    """Return the rollout of groups. Raises AgentError if all episodes have failed."""
    if not any(group.samples for group in groups):
        first = f" (the first {failed[0].message:.200})" if failed else ""
        raise AgentError(
            f"--episode-failures: all episodes of a rollout have failed{first}. Mend the "
            "function that rolls them out; a run that goes on from a checkpoint has those that failed "
            "after it fail again, unless observations.jsonl is removed from its --run-dir.",
            reason="all",
        )
    speed = tokens / seconds if seconds else 0.0
    metrics = {**rollout_metrics(groups), **metrics, "perf/rollout_tokens_per_second": speed}
    return groups, metrics, failed


def _end(groups: Groups) -> None:
    for episode in chain.from_iterable(groups):
        episode.end()


def failed_attempts(groups: Groups) -> list[FailedAttempt]:
    """Return the failed attempts of groups, complete or not."""
    return [
        FailedAttempt(
            prompt=episode.prompt,
            group=episode.number,
            sample_index=episode.index,
            attempt=attempt,
            reason=failure.reason,
            message=failure.message,
            said=failure.said,
        )
        for episode in chain.from_iterable(groups)
        for attempt, failure in enumerate(episode.all_failures)
    ]


def failure_metrics(failed: Sequence[FailedAttempt]) -> dict[str, float]:
    """Return the number of failed attempts, in total and by reason."""
    reasons = Counter(f"rollout/failed_episodes/{each.reason}" for each in failed)
    return {"rollout/num_failed_episodes": float(len(failed))} | {
        name: float(count) for name, count in sorted(reasons.items())
    }
