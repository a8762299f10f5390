"""Samples and scores prompts: those of a rollout, and those of the evaluation sets."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from onpolicy.config import TrainConfig
from onpolicy.errors import TrainingError
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.free_groups import FreeGroups, Staleness
from onpolicy.rollout.open_groups import OpenGroup, OpenGroups
from onpolicy.rollout.sampling import group_samples, make_group, make_requests, require_version
from onpolicy.rollout.statistics import eval_metrics, rollout_metrics
from onpolicy.run.engines import EnginePair
from onpolicy.run.inputs import Inputs
from onpolicy.run.train_samples import has_signal
from onpolicy.types import (
    Completion,
    Prompt,
    Request,
    Sample,
    SampleGroup,
    SamplingParams,
)

Metrics = dict[str, float]

Generate = Callable[[Sequence[Request]], list[Completion]]
"""One response per request, in their order."""


@dataclass(slots=True, kw_only=True)
class Rollout:
    """What a step is to train on."""

    groups: list[SampleGroup]
    metrics: Metrics


def _rollout_of(
    groups: list[SampleGroup], metrics: Metrics, tokens: float, seconds: float
) -> Rollout:
    """With `metrics` and those of the groups; `tokens` were drawn in `seconds`."""
    speed = tokens / seconds if seconds else 0.0
    drawing = {"perf/rollout_tokens_per_second": speed}
    return Rollout(groups=groups, metrics={**rollout_metrics(groups), **metrics, **drawing})


class Sampler:
    """Asks the engines for samples, and the scorer for their rewards."""

    def __init__(
        self,
        config: TrainConfig,
        inputs: Inputs,
        engines: EnginePair,
        scorer: Scorer,
        on_requests: Callable[[int], None],
    ):
        self.config, self.inputs, self.engines = config, inputs, engines
        self._scorer, self.on_requests = scorer, on_requests
        self.open = self._open_groups()
        self.ready: list[SampleGroup] = []
        """Complete, scored, and not trained on; the oldest first."""

    def _open_groups(self) -> OpenGroups:
        rollout = self.config.rollout
        width = self.config.open_groups * rollout.n_samples_per_prompt
        longest = rollout.rollout_max_response_len
        if rollout.rollout_schedule != "free":
            return OpenGroups(self.open_group, width, rollout.rollout_segment_tokens or longest)
        size = rollout.rollout_batch_size
        staleness = Staleness(most=rollout.max_staleness, batch=size)
        return FreeGroups(self.open_group, width, longest, staleness, rollout.num_rollout * size)

    def finish(self, complete: Sequence[OpenGroup], tokens: int, seconds: float) -> Rollout:
        """Of complete groups, in their order: scored, and nothing left out.

        `tokens`, `seconds`: what was drawn since the last rollout, and how long that took.
        """
        return _rollout_of(*self._scored(complete), tokens, seconds)

    def roll_out(self, step: int, version: int, generate: Generate) -> Rollout:
        """Draw the groups of a step: the oldest that are complete, in rounds until there are enough.

        Raises EngineError for a token that was not sampled from the weights of `version`, and
        TrainingError if too many groups in a row are without a signal.
        """
        wanted, found = self.config.rollout.rollout_batch_size, defaultdict[str, float](float)
        while len(self.ready) < wanted:
            self._draw_round(version, generate, found)
            self._require_signal(step, found["rollout/num_resampled_groups"])
        groups, self.ready = self.ready[:wanted], self.ready[wanted:]
        if self.ready and not self.config.rollout.rollout_segment_tokens:
            found["rollout/num_surplus_groups"] += len(self.ready)
            self.ready = []  # a step's samples are all of one version
        tokens, seconds = found.pop("tokens", 0.0), found.pop("seconds", 0.0)
        return _rollout_of(groups, found, tokens, seconds)

    def _draw_round(self, version: int, generate: Generate, found: Metrics) -> None:
        started = time.perf_counter()
        slots = self.open.next_round()
        self.on_requests(len(slots))
        completions = generate([self.open.request(slot) for slot in slots])
        sampled = time.perf_counter()
        for completion in completions:
            require_version(completion, str(version), by_token=self.config.may_lag)
        complete = self.open.take(slots, completions)
        found["tokens"] += sum(len(completion.response_ids) for completion in completions)
        found["seconds"] += sampled - started
        for name, value in self._make_ready(complete).items():
            found[name] += value

    def _make_ready(self, complete: Sequence[OpenGroup]) -> Metrics:
        """Score groups, and keep those that are worth it."""
        if not complete:
            return {}
        groups, metrics = self._scored(complete)
        if self.config.rollout.dynamic_sampling:
            found = len(groups)
            groups = [group for group in groups if has_signal(group)]
            metrics["rollout/num_resampled_groups"] = float(found - len(groups))
        self.ready = sorted([*self.ready, *groups], key=lambda group: group.number)
        return metrics

    def _scored(self, complete: Sequence[OpenGroup]) -> tuple[list[SampleGroup], Metrics]:
        groups, metrics = self._score(
            [group.prompt for group in complete],
            [c for group in complete for c in group.completions if c is not None],
        )
        for group, drawn in zip(groups, complete, strict=True):
            group.number = drawn.number
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
        """The group of the prompt that comes after `number` others; nothing of it is drawn."""
        rollout, prompt = self.config.rollout, self.inputs.prompts.at(number)
        params = self._params(rollout.rollout_temperature, rollout.rollout_max_response_len)
        params = replace(params, return_routed_experts=self.engines.replays_routing)
        count, batch = rollout.n_samples_per_prompt, rollout.rollout_batch_size
        seed_key = (self.config.seed, "rollout", *divmod(number, batch))
        requests = make_group(prompt, count, params, *seed_key)
        return OpenGroup(
            number=number, prompt=prompt, requests=requests, completions=[None] * count
        )

    def request_of(self, sample: Sample, groups: Sequence[SampleGroup]) -> Request:
        """What a sample of some groups was an answer to."""
        group = next(g for g in groups if any(s is sample for s in g.samples))
        return self.open_group(group.number).requests[sample.sample_index]

    def evaluate(self, name: str) -> tuple[list[SampleGroup], Metrics]:
        """Sample and score one evaluation set; another set beside it changes nothing."""
        evaluation = self.config.eval
        length = evaluation.eval_max_response_len or self.config.rollout.rollout_max_response_len
        params = self._params(evaluation.eval_temperature, length)
        prompts, count = self.inputs.eval_sets[name], evaluation.n_samples_per_eval_prompt
        seed_key = ["eval", name] if name else ["eval"]
        requests = make_requests(prompts, count, params, self.config.seed, *seed_key)
        self.on_requests(len(requests))
        completions = self.engines.generate(requests)
        for completion in completions:
            require_version(completion, self.engines.weight_version)
        groups, _ = self._score(prompts, completions)
        return groups, eval_metrics(groups, name)

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

    def _score(
        self, prompts: Sequence[Prompt], completions: Iterable[Completion]
    ) -> tuple[list[SampleGroup], Metrics]:
        completions = list(completions)
        texts = self.inputs.tokenizer.batch_decode(
            [completion.response_ids for completion in completions], skip_special_tokens=True
        )
        groups = group_samples(prompts, completions, texts)
        return groups, self._scorer.score([sample for g in groups for sample in g.samples])
