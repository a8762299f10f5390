"""Samples and scores prompts: those of a rollout, and those of the evaluation sets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from onpolicy.config import TrainConfig
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.sampling import group_samples, make_requests
from onpolicy.rollout.statistics import eval_metrics, rollout_metrics
from onpolicy.run.engines import EnginePair
from onpolicy.run.inputs import Inputs
from onpolicy.train import distributed
from onpolicy.types import Completion, Prompt, Request, Sample, SampleGroup, SamplingParams

Metrics = dict[str, float]


class Sampler:
    """Every rank of the trainer holds one; rank 0, which has a scorer, shares what comes out."""

    def __init__(
        self,
        config: TrainConfig,
        inputs: Inputs,
        engines: EnginePair,
        scorer: Scorer | None,
        on_requests: Callable[[int], None],
    ):
        self.config, self.inputs, self.engines = config, inputs, engines
        self._scorer, self._on_requests = scorer, on_requests

    def roll_out(self, step: int) -> tuple[list[SampleGroup], Metrics]:
        """Sample and score the prompts of a step."""
        rollout = self.config.rollout
        prompts = self.inputs.prompts.batch(step, rollout.rollout_batch_size)
        params, count = self._rollout_params(), rollout.n_samples_per_prompt
        groups, metrics = self._sample(prompts, count, params, "rollout", step)
        return groups, {**rollout_metrics(groups), **metrics}

    def request_of(self, sample: Sample, groups: Sequence[SampleGroup], step: int) -> Request:
        """What a sample of a rollout was an answer to; `groups` are all of that rollout."""
        prompts, count = [g.prompt for g in groups], self.config.rollout.n_samples_per_prompt
        seed_key = (self.config.seed, "rollout", step)
        requests = make_requests(prompts, count, self._rollout_params(), *seed_key)
        samples = [s for g in groups for s in g.samples]
        return next(r for r, s in zip(requests, samples, strict=True) if s is sample)

    def _rollout_params(self) -> SamplingParams:
        rollout = self.config.rollout
        params = self._params(rollout.rollout_temperature, rollout.rollout_max_response_len)
        return replace(params, return_routed_experts=self.engines.replays_routing)

    def evaluate(self, name: str) -> tuple[list[SampleGroup], Metrics]:
        """Sample and score one evaluation set; another set beside it changes nothing."""
        evaluation = self.config.eval
        length = evaluation.eval_max_response_len or self.config.rollout.rollout_max_response_len
        params = self._params(evaluation.eval_temperature, length)
        prompts, count = self.inputs.eval_sets[name], evaluation.n_samples_per_eval_prompt
        seed_key = ["eval", name] if name else ["eval"]
        groups, _ = self._sample(prompts, count, params, *seed_key)
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

    def _sample(
        self, prompts: list[Prompt], count: int, params: SamplingParams, *seed_key: int | str
    ) -> tuple[list[SampleGroup], Metrics]:
        started = time.perf_counter()
        requests = make_requests(prompts, count, params, self.config.seed, *seed_key)
        self._on_requests(len(requests))
        completions = self.engines.generate(requests)
        seconds = time.perf_counter() - started
        tokens = sum(len(completion.response_ids) for completion in completions)
        groups, metrics = distributed.run_on_rank_zero(lambda: self._score(prompts, completions))
        metrics["perf/rollout_tokens_per_second"] = tokens / seconds
        metrics["perf/rollout_time"] = time.perf_counter() - started
        return groups, metrics

    def _score(
        self, prompts: list[Prompt], completions: Sequence[Completion]
    ) -> tuple[list[SampleGroup], Metrics]:
        assert self._scorer is not None
        texts = self.inputs.tokenizer.batch_decode(
            [completion.response_ids for completion in completions], skip_special_tokens=True
        )
        groups = group_samples(prompts, completions, texts, self.engines.weight_version)
        return groups, self._scorer.score([sample for g in groups for sample in g.samples])
