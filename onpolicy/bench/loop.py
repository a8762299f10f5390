"""`onpolicy bench loop`: whole steps of reinforcement learning, from the requests to the push."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

from transformers import PretrainedConfig

from onpolicy.bench.measured_run import ForcedLengths, MeasuredRun, measured_run
from onpolicy.bench.own_process import as_users_start_it
from onpolicy.bench.setting import KINDS, backends, setting, settings
from onpolicy.bench.turns import compare_in_turns
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.cluster_engines import MakeEngines, on_cluster

PHASES = {"rollout": "drawing", "train": "train", "push": "push"}
"""The phases of a step in the result, and the fields that hold them."""


def bench_loop(config: BenchConfig) -> dict[str, Any]:
    """Return sampled tokens per second of whole steps for each kind of operators, and seconds per
    phase.

    Stock engines do the extra work that their mismatch requires: the trainer recomputes the
    log-probabilities of the samples, and weights them by token (--use-tis).
    """
    hf_config = load_config(config.model.hf_checkpoint)
    backend = backends(config)[0]
    with (
        on_cluster(*setting(config, hf_config, "aligned", backend)) as cluster,
        ExitStack() as on_exit,
    ):
        runs = {}
        for kind in KINDS:
            started = started_run(config, hf_config, kind, cluster.make_engines)
            with as_users_start_it(kind):
                runs[kind] = on_exit.enter_context(started)
        result = compare_in_turns(
            {kind: run.step for kind, run in runs.items()}, config.repetitions
        )
    for kind, run in runs.items():
        measured = run.steps[1:]  # the first warms up
        result[kind]["seconds"] = {
            phase: median(step[name] for step in measured) for phase, name in PHASES.items()
        }
    return {"what": "loop", "unit": "sampled tokens per second", **result, **settings(config)}


def started_run(
    config: BenchConfig,
    hf_config: PretrainedConfig,
    kind: str,
    make_engines: MakeEngines = EnginePair,
) -> AbstractContextManager[MeasuredRun]:
    """Return a run on one kind of operators, whose responses all have --max-new-tokens."""
    train_config, _ = setting(config, hf_config, kind, backends(config)[0])
    length = config.max_new_tokens
    rollout = replace(train_config.rollout, rollout_max_response_len=length)
    made, rollouter = replace(train_config, rollout=rollout), ForcedLengths(lambda seed: length)
    steps = 1 + config.repetitions
    return measured_run(config, made, hf_config, kind, make_engines, rollouter, steps)
