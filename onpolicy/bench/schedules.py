"""`onpolicy bench loop --longest-response N`: whole steps under several schedules, side by side.

Lengths of responses are log-normal, since a reasoning model's are long-tailed, and a function of
the request's seed: so every schedule samples the same lengths in the order of the prompts.
"""

from __future__ import annotations

import math
import random
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

from transformers import PretrainedConfig

from onpolicy.bench.measured_run import ForcedLengths, MeasuredRun, measured_run
from onpolicy.bench.setting import backends, make_train_config, setting, settings
from onpolicy.bench.turns import take_turns
from onpolicy.config import TrainConfig
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch.cluster_engines import MakeEngines, on_cluster

SPREAD = 1.0
"""Standard deviation of a length's logarithm."""

WARM_UP = 3
"""Discarded steps of each: where long responses stay open, the first steps get short ones."""


def schedules(config: BenchConfig) -> dict[str, dict[str, Any]]:
    """Return the flags of each schedule."""
    return {
        "lag 0": {},
        "lag 1": {"rollout_lag": 1},
        "free": {"rollout_schedule": "free"},
    }


def bench_schedules(config: BenchConfig) -> dict[str, Any]:
    """Return the speed of each schedule: trained tokens per second over all measured steps, its
    ratio to lag 0, the busy shares of engines and trainer; and for each step its seconds (all,
    sampling, training, push), its tokens, and its longest response.

    They take steps in turns; sampling beside the training of a step has ended when the step has
    pushed.
    """
    hf_config = load_config(config.model.hf_checkpoint)
    first = setting(config, hf_config, "aligned", backends(config)[0])
    with on_cluster(*first) as cluster, ExitStack() as on_exit:
        runs = {
            name: on_exit.enter_context(started(config, hf_config, name, cluster.make_engines))
            for name in schedules(config)
        }
        take_turns({name: run.step for name, run in runs.items()}, WARM_UP, config.repetitions)
    found = {name: summed(run.steps[WARM_UP:]) for name, run in runs.items()}
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
    """Return the configuration of an aligned run under a schedule."""
    made = make_train_config(config, "aligned", backends(config)[0])
    flags = {"rollout_max_response_len": config.longest_response, **schedules(config)[schedule]}
    return replace(made, rollout=replace(made.rollout, **flags))


def drawn_length(config: BenchConfig, seed: int) -> int:
    """Return a log-normal length with the median --max-new-tokens, cut at --longest-response."""
    assert config.longest_response is not None
    length = config.max_new_tokens * math.exp(SPREAD * random.Random(seed).gauss(0, 1))
    return max(1, min(config.longest_response, round(length)))


def started(
    config: BenchConfig, hf_config: PretrainedConfig, schedule: str, make_engines: MakeEngines
) -> AbstractContextManager[MeasuredRun]:
    """Start a run under a schedule, whose responses have lengths given by their requests' seeds."""
    made, name = make_config(config, schedule), schedule.replace(", ", "_")
    rollouter = ForcedLengths(lambda seed: drawn_length(config, seed))
    steps = WARM_UP + config.repetitions
    return measured_run(config, made, hf_config, name, make_engines, rollouter, steps)


def summed(steps: list[dict[str, float]]) -> dict[str, Any]:
    """Return the result of a schedule from the records of its measured steps."""
    total = {name: sum(step[name] for step in steps) for name in steps[0]}
    return {
        "tokens_per_second": total["tokens"] / total["step"],
        "step_seconds": [step["step"] for step in steps],
        "median_step_seconds": median(step["step"] for step in steps),
        "tokens": [step["tokens"] for step in steps],
        "longest_responses": [step["longest"] for step in steps],
        "drawing_seconds": [step["drawing"] for step in steps],
        "train_seconds": [step["train"] for step in steps],
        "push_seconds": [step["push"] for step in steps],
        "rollout_busy_share": total["drawing"] / total["step"],
        "trainer_busy_share": total["train"] / total["step"],
        "push_share": total["push"] / total["step"],
        "longest_lag": max(step["lag"] for step in steps),
    }
