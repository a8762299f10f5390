"""Gain of sending requests with the longest prompts first, to two engines, measured in turns.

    python -m benchmarks.longest_first [--layers 2] [--repetitions 5] [--json FILE]

64 requests of 16 tokens to prompts of 16 to 1,024 tokens (log-normal, median 128) go to two servers of
the model of `benchmarks.shared_prefixes`, 8 at a time to each, from an empty cache: as they are given,
or sorted. `speed` is the median of neighbours' seconds in their order by those sorted.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import math
import os
import random
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

from onpolicy.compat.process import prepare_process

prepare_process()  # before torch is imported

from benchmarks.bench.turns import take_turns
from benchmarks.shared_prefixes import make_model, tokens
from onpolicy.cli.command import put_out
from onpolicy.config import TrainConfig, groups
from onpolicy.models.hf_config import load_config
from onpolicy.outputs.directory import versions
from onpolicy.rollout.base import RolloutGroup, SamplingJob
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import make_rollout_group
from onpolicy.types import Request, SamplingParams

REQUESTS, AT_ONCE, RESPONSE, LONGEST = 64, 8, 16, 1024


def make_group(checkpoint: str, logs: Path) -> RolloutGroup:
    config = TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=checkpoint, dtype="float32"),
        rollout=groups.RolloutConfig(
            num_rollout=1, rollout_batch_size=REQUESTS, n_samples_per_prompt=1
        ),
        engine=groups.EngineConfig(
            cpu_threads=1, rollout_num_engines=2, rollout_max_concurrency=AT_ONCE
        ),
        parity=groups.ParityConfig(true_on_policy_mode=True),
    )
    hf_config = load_config(checkpoint)
    contract = contract_for(config, hf_config, aligned=True)
    return make_rollout_group(config, hf_config, contract, logs, LONGEST + RESPONSE)


def requests() -> list[Request]:
    rng = random.Random(0)
    lengths = [round(128 * math.exp(rng.gauss(0, 1))) for _ in range(REQUESTS)]
    params = SamplingParams(
        temperature=1.0, max_new_tokens=RESPONSE, stop_token_ids=(), ignore_eos=True
    )
    return [
        Request(prompt_ids=tokens(max(16, min(LONGEST, n)), seed=i), sampling_seed=i, params=params)
        for i, n in enumerate(lengths)
    ]


def sample(group: RolloutGroup, asked: Sequence[Request]) -> tuple[float, list[list[float]]]:
    """Return seconds, and the log-probabilities in the order of the seeds."""
    for client in group.clients:
        client.flush_cache()
    started = time.perf_counter()
    answers = group.generate(SamplingJob([*asked]))
    spent, seeds = time.perf_counter() - started, [each.sampling_seed for each in asked]
    said = sorted(zip(seeds, (a.log_probs for a in answers), strict=True))
    return spent, [log_probs for _, log_probs in said]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    given, load = requests(), os.getloadavg()
    orders = {"given": given, "longest first": sorted(given, key=lambda r: -len(r.prompt_ids))}
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "model"
        make_model(args.layers).causal_lm.save_pretrained(checkpoint)
        group = make_group(str(checkpoint), Path(directory) / "logs")
        try:
            group.launch()
            group.connect({})
            measures = {name: partial(sample, group, asked) for name, asked in orders.items()}
            runs = take_turns(measures, 1, args.repetitions)
        finally:
            group.stop()
    said = [log_probs for each in runs.values() for _, log_probs in each]
    assert all(each == said[0] for each in said), "the samples are not the same bits"
    seconds = {name: [spent for spent, _ in each] for name, each in runs.items()}
    pairs = [a / b for a, b in zip(*seconds.values(), strict=True)]
    found = {"speed": median(pairs), "pairs": pairs, "seconds": seconds, "layers": args.layers}
    put_out({**found, "load": [load, os.getloadavg()], "versions": versions()}, args.json)


if __name__ == "__main__":
    main()
