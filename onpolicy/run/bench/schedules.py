"""`onpolicy bench loop --longest-response N`: whole steps under several schedules, side by side.

Lengths of responses are log-normal, as those of a model that reasons are long-tailed, and each request
says its own: so every schedule draws the same lengths in the order of the prompts.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.config.groups import RewardConfig
from onpolicy.config.tools import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.rewards.scorer import Scorer
from onpolicy.rollout.open_groups import OpenGroup
from onpolicy.rollout.prompts import PromptSource
from onpolicy.run.bench.alternate import take_turns
from onpolicy.run.bench.loop import LEARNING_RATE, even_share
from onpolicy.run.bench.requests import random_prompts, sampling_params
from onpolicy.run.bench.setting import backends, make_train_config, setting, settings
from onpolicy.run.cluster import MakeEngines, on_cluster
from onpolicy.run.drawing import make_drawing
from onpolicy.run.engines import EnginePair
from onpolicy.run.inputs import Inputs, make_ladder
from onpolicy.run.ladder import Ladder
from onpolicy.run.probe import Probe
from onpolicy.run.sampler import Sampler
from onpolicy.run.train_samples import make_train_samples
from onpolicy.types import Sample

SPREAD = 1.0
"""Standard deviation of a length's logarithm."""

WARM_UP = 3
"""Steps of each that are thrown away: where long responses stay open, the first steps get short ones."""

ENDLESS = 1 << 20
"""Rollouts of a run whose last ones are not to come."""


def schedules(config: BenchConfig) -> dict[str, dict[str, Any]]:
    """Flags of each schedule; a round is as long as the median response."""
    segment = {"rollout_segment_tokens": config.max_new_tokens}
    return {
        "lag 0": {},
        "lag 1": {"rollout_lag": 1},
        "segments": segment,
        "lag 1, segments": {"rollout_lag": 1, **segment},
        "free": {"rollout_schedule": "free"},
    }


def bench_schedules(config: BenchConfig) -> dict[str, Any]:
    """Of each schedule: trained tokens per second over all measured steps, that over lag 0's, the shares
    of the time in which engines and trainer were at work; and of each step its seconds (all, drawing,
    training, push), its tokens, and its longest response.

    They take a step each in turns; what one draws beside its training has ended when it has pushed.
    """
    hf_config = load_config(config.model.hf_checkpoint)
    first = setting(config, hf_config, "aligned", backends(config)[0])
    with on_cluster(*first) as make_engines, ExitStack() as on_exit:
        loops = {
            name: on_exit.enter_context(started(config, hf_config, name, make_engines))
            for name in schedules(config)
        }
        take_turns([loop.step for loop in loops.values()], WARM_UP, config.repetitions)
        found = {name: loop.result() for name, loop in loops.items()}
    base = found["lag 0"]["tokens_per_second"]
    for result in found.values():
        result["speed"] = result["tokens_per_second"] / base
    return {
        "what": "loop",
        "unit": "trained tokens per second",
        "schedules": found,
        "longest_response": config.longest_response,
        "n_samples_per_prompt": config.n_samples_per_prompt,
        **settings(config),
    }


def make_config(config: BenchConfig, schedule: str) -> TrainConfig:
    """An aligned run under a schedule."""
    made = make_train_config(config, "aligned", backends(config)[0])
    flags = {
        "num_rollout": ENDLESS,
        "rollout_max_response_len": config.longest_response,
        **schedules(config)[schedule],
    }
    return replace(made, rollout=replace(made.rollout, **flags))


class EvenTokens(Scorer):
    """Rewards without processes of their own."""

    def score(self, samples: Sequence[Sample]) -> dict[str, float]:
        for sample in samples:
            sample.reward = even_share(sample.completion)
        return {}


class ForcedLengths(Sampler):
    """Every response has a length of its own, by its place in the order of the prompts."""

    def __init__(self, bench: BenchConfig, *args: Any):
        super().__init__(*args)
        self._bench = bench

    def open_group(self, number: int) -> OpenGroup:
        group, params = super().open_group(number), sampling_params(self._bench)
        for i, request in enumerate(group.requests):
            length = drawn_length(self._bench, f"{number}/{i}")
            group.requests[i] = replace(request, params=replace(params, max_new_tokens=length))
        return group


def drawn_length(config: BenchConfig, seed: str) -> int:
    """Log-normal with the median --max-new-tokens, cut at --longest-response."""
    assert config.longest_response is not None
    length = config.max_new_tokens * math.exp(SPREAD * random.Random(seed).gauss(0, 1))
    return max(1, min(config.longest_response, round(length)))


class ScheduledLoop:
    """The two engines under one schedule, and a step after the other."""

    def __init__(self, sampler: Sampler, engines: EnginePair):
        self._sampler, self._engines, self._num_steps = sampler, engines, 0
        self._probe = Probe(sampler.config, sampler.inputs, engines)
        self.rollouts = make_drawing(sampler, engines, 0)
        self._steps: list[dict[str, float]] = []

    def step(self) -> None:
        """Take a rollout, train, wait as the schedule says, push and probe, as a run does."""
        config, step = self._sampler.config, self._num_steps
        started = time.perf_counter()
        groups = self.rollouts.take(step).groups
        version = step if config.may_lag else None
        taken = time.perf_counter()
        samples = make_train_samples(groups, config.algorithm, version)
        self._engines.trainer.train(samples, step, [LEARNING_RATE])
        trained = time.perf_counter()
        drawing = self.rollouts.settle()
        settled = time.perf_counter()
        self._num_steps += 1
        self._engines.push_weights(str(self._num_steps))
        if config.may_lag:
            self._probe.compare()
        ended = time.perf_counter()
        self._steps.append({
            "step": ended - started, "train": trained - taken, "drawing": drawing,
            "push": ended - settled, "tokens": sum(len(s.sample.response_ids) for s in samples),
            "longest": max(len(s.sample.response_ids) for s in samples),
            "lag": max(max(sample.lags) for sample in samples),
        })  # fmt: skip

    def result(self) -> dict[str, Any]:
        measured = self._steps[WARM_UP:]
        total = {name: sum(step[name] for step in measured) for name in measured[0]}
        return {
            "tokens_per_second": total["tokens"] / total["step"],
            "step_seconds": [step["step"] for step in measured],
            "median_step_seconds": median(step["step"] for step in measured),
            "tokens": [step["tokens"] for step in measured],
            "longest_responses": [step["longest"] for step in measured],
            "drawing_seconds": [step["drawing"] for step in measured],
            "train_seconds": [step["train"] for step in measured],
            "push_seconds": [step["push"] for step in measured],
            "rollout_busy_share": total["drawing"] / total["step"],
            "trainer_busy_share": total["train"] / total["step"],
            "push_share": total["push"] / total["step"],
            "longest_lag": max(step["lag"] for step in measured),
        }


@contextmanager
def started(
    config: BenchConfig, hf_config: PretrainedConfig, name: str, make_engines: MakeEngines
) -> Iterator[ScheduledLoop]:
    """Engines under one schedule with the checkpoint's weights in both; they end afterwards."""
    made = make_config(config, name)
    ladder, longest = make_ladder(made, hf_config), made.rollout.rollout_max_response_len
    engines = make_engines(
        made, hf_config, ladder.contract, Path(config.run_dir) / name.replace(", ", "_"),
        longest_sequence=config.prompt_len + longest,
    )  # fmt: skip
    inputs = _inputs(config, hf_config, ladder)
    try:
        engines.start()
        engines.use(ladder.contract, ladder.fallback)
        scorer = EvenTokens(RewardConfig())
        loop = ScheduledLoop(
            ForcedLengths(config, made, inputs, engines, scorer, lambda count: None), engines
        )
        engines.push_weights("0")
        yield loop
        loop.rollouts.close()
    finally:
        engines.stop()


def _inputs(config: BenchConfig, hf_config: PretrainedConfig, ladder: Ladder) -> Inputs:
    prompts = random_prompts(config, hf_config.vocab_size)
    return Inputs(
        hf_config=hf_config,
        ladder=ladder,
        tokenizer=load_tokenizer(config.model.hf_checkpoint, False),
        prompts=PromptSource(prompts, 0, shuffle=False),
        eval_sets={},
        stop_token_ids=(),
    )
