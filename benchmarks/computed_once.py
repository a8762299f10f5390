"""Whole steps of the loop that compute a prompt once, beside steps that do so for each sample.

    python -m benchmarks.computed_once loop --hf-checkpoint MODEL --prompt-len 512 --max-new-tokens 64 \\
      --num-prompts 2 --n-samples-per-prompt 8 --repetitions 3 --json FILE

It takes the flags of `onpolicy bench loop`. Both runs are on aligned operators, with servers and a
trainer of their own, and take a step each in turns. `once` has --share-prefixes on, and a server that
prefills a group's prompt once; `each` has neither. `ratio` is sampled tokens per second of `once` over
`each`.
"""

# ruff: noqa: E402
from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from onpolicy.compat.process import prepare_process

prepare_process()  # before torch is imported

from transformers import PretrainedConfig

from benchmarks.bench.loop import PHASES
from benchmarks.bench.measured_run import ForcedLengths, MeasuredRun, measured_run
from benchmarks.bench.setting import backends, make_train_config, setting, settings
from benchmarks.bench.turns import compare_in_turns
from benchmarks.prefill_once import KINDS
from onpolicy.cli.command import begin, put_out
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch.cluster_engines import MakeEngines, on_cluster
from onpolicy.run.launch.engine_specs import make_rollout_group

SHARED = {"once": "on", "each": "off"}

MAX_TOKENS = 2048
"""The value of --max-tokens-per-gpu, small enough for a small machine."""


def started(
    config: BenchConfig, hf_config: PretrainedConfig, kind: str, make_engines: MakeEngines
) -> AbstractContextManager[MeasuredRun]:
    """Return a run of one of SHARED, whose responses all have --max-new-tokens."""
    made, length = make_train_config(config, "aligned", backends(config)[0]), config.max_new_tokens
    made = replace(
        made,
        rollout=replace(made.rollout, rollout_max_response_len=length),
        trainer=replace(made.trainer, share_prefixes=SHARED[kind], max_tokens_per_gpu=MAX_TOKENS),
    )
    servers = partial(make_rollout_group, extensions=KINDS[kind])
    make = partial(make_engines, make_rollout=servers)
    rollouter, steps = ForcedLengths(lambda seed: length), 1 + config.repetitions
    return measured_run(config, made, hf_config, kind, make, rollouter, steps)


def bench(config: BenchConfig) -> dict[str, Any]:
    """Measure both in turns; return also the median seconds of each phase."""
    hf_config, load = load_config(config.model.hf_checkpoint), os.getloadavg()
    first = setting(config, hf_config, "aligned", backends(config)[0])
    with on_cluster(*first) as cluster, ExitStack() as on_exit:
        runs = {
            kind: on_exit.enter_context(started(config, hf_config, kind, cluster.make_engines))
            for kind in SHARED
        }
        steps = {kind: run.step for kind, run in runs.items()}
        result = compare_in_turns(steps, config.repetitions)
    for kind, run in runs.items():
        measured = run.steps[1:]  # the first warms up
        result[kind]["seconds"] = {
            phase: median(step[name] for step in measured) for phase, name in PHASES.items()
        }
    samples = {"n_samples_per_prompt": config.n_samples_per_prompt, "load": [load, os.getloadavg()]}
    return {"unit": "sampled tokens per second", **result, **samples, **settings(config)}


def main(argv: Sequence[str]) -> None:
    config = begin(BenchConfig, argv, "computed_once")
    put_out(bench(config), config.json)


if __name__ == "__main__":
    main(sys.argv[1:])
