"""Cost of rounded weights and inputs of linears in both engines, against bfloat16, in turns.

    python -m benchmarks.rounding_cost --hf-checkpoint runs/quickstart/inputs/model [--json FILE]

A step is timed in processor seconds, since neighbours of a shared machine take none of them; servers,
side by side, by what they sample a second. A server holds rounded weights in bfloat16, with neither
time nor memory changed.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from onpolicy.compat.process import prepare_process

prepare_process()  # before torch is imported

from benchmarks.bench.requests import random_requests
from benchmarks.bench.rollout import rollout_measure
from benchmarks.bench.setting import make_train_config
from benchmarks.bench.step import step_measure
from benchmarks.bench.turns import Measure, take_turns
from onpolicy.cli.command import put_out
from onpolicy.cluster.placement import share_of_cores
from onpolicy.config import TrainConfig
from onpolicy.config.flags import with_flags
from onpolicy.config.groups import CheckpointConfig
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.contract import NumericsContract
from onpolicy.models.hf_config import load_config
from onpolicy.outputs.directory import versions
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import make_rollout_group
from onpolicy.train import make_trainer
from onpolicy.train.advantages import RewardEstimator
from onpolicy.weights.rounding import FORMATS

PLAIN = "bfloat16"
INPUTS = {"fp8_e4m3 inputs": {"rollout_activation_format": "fp8_e4m3"}}
WEIGHTS = {f"{name} weights": {"rollout_weight_format": name} for name in FORMATS}

Setting = tuple[TrainConfig, NumericsContract]


def settings_of(bench: BenchConfig, chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, Setting]:
    hf_config = load_config(bench.model.hf_checkpoint)
    configs = {
        name: with_flags(make_train_config(bench, "aligned"), flags)
        for name, flags in {PLAIN: {}, **chosen}.items()
    }
    return {
        name: (config, contract_for(config, hf_config, aligned=True))
        for name, config in configs.items()
    }


def step_of(setting: Setting, bench: BenchConfig) -> Callable[[], float]:
    """Return a function that measures the processor seconds of an optimizer step, rounding
    included."""
    trainer = make_trainer(*setting, share_of_cores(1), RewardEstimator("reinforce"))
    step = step_measure(trainer, max(bench.num_tokens), bench, 1)

    def measure() -> float:
        started = time.process_time()
        step()
        return time.process_time() - started

    return measure


def times_of_plain(runs: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of neighbours' ratios to bfloat16."""
    plain = runs[PLAIN]
    return {
        name: median(x / y for x, y in zip(values, plain, strict=True))
        for name, values in runs.items()
    }


def rollouts(bench: BenchConfig, repetitions: int) -> dict[str, list[float]]:
    """Return the tokens per second of servers with plain and with rounded inputs."""
    hf_config = load_config(bench.model.hf_checkpoint)
    requests = random_requests(bench, hf_config.vocab_size)
    longest, measures = bench.prompt_len + bench.max_new_tokens, dict[str, Measure]()
    with ExitStack() as on_exit:
        for name, (config, contract) in settings_of(bench, INPUTS).items():
            logs = Path(bench.run_dir) / name
            group = make_rollout_group(config, hf_config, contract, logs, longest)
            on_exit.callback(group.stop)
            group.launch()
            group.connect({})
            measures[name] = rollout_measure(group, requests)
        return take_turns(measures, 1, repetitions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--run-dir", default="runs/rounding_cost")
    parser.add_argument("--servers-only", action="store_true")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    bench = partial(
        BenchConfig,
        model=CheckpointConfig(hf_checkpoint=args.hf_checkpoint),
        num_tokens=(args.num_tokens,),
        prompt_len=32,
        max_new_tokens=96,
        run_dir=args.run_dir,
    )
    sampled = rollouts(bench(what="rollout"), args.repetitions)
    settings = settings_of(bench(what="step"), {**WEIGHTS, **INPUTS})
    timed = {} if args.servers_only else settings
    steps = {name: step_of(setting, bench(what="step")) for name, setting in timed.items()}
    spent = take_turns(steps, 1, args.repetitions)
    of_steps = {
        "tokens": args.num_tokens,
        "processor_seconds_of_a_step": median(spent[PLAIN]),
        "step": times_of_plain(spent),
    } if steps else {}  # fmt: skip
    result = {
        "what": "rounding",
        **of_steps,
        "tokens_per_second": median(sampled[PLAIN]),
        "rollout": times_of_plain(sampled),
        "versions": versions(),
    }
    put_out(result, args.json)


if __name__ == "__main__":
    main()
