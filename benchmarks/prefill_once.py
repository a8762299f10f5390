"""Gain from prefilling a group's prompt once: 4 groups of 8 that are sent at once, with and
without, in turns.

    python -m benchmarks.prefill_once [--layers 4] [--repetitions 3] [--only 64] [--json FILE]

A server of each kind serves a model of random weights of Qwen3's form with a hidden size of 1,024, in
float32, from an empty cache. `computed` counts the prompts' tokens that it did not hold. `seconds`
and `processor_seconds` cover all groups; `speed` is the median ratio of neighbours' processor time
without to with, which a busy machine disturbs less than wall-clock time.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from onpolicy.compat.process import prepare_process

prepare_process()  # before torch is imported

import psutil

from benchmarks.bench.turns import take_turns
from benchmarks.shared_prefixes import VOCAB, make_model, tokens
from onpolicy.cli.command import put_out
from onpolicy.config import TrainConfig, groups
from onpolicy.contract import NumericsContract
from onpolicy.models.hf_config import load_config
from onpolicy.outputs.directory import versions
from onpolicy.rollout.base import RolloutGroup, SamplingJob
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import make_rollout_group
from onpolicy.trajectory import Completion
from onpolicy.types import Request, SamplingParams
from sglang_patches import prefill_once
from sglang_patches.extensions import Extension

PROMPTS, GROUPS, SAMPLES, RESPONSE = (256, 64), 4, 8, 16


class EachPrefills(Extension):
    """An extension by which no request waits for another's prefill."""

    def __init__(self, _: str):
        pass

    def install(self, contract: NumericsContract) -> None:
        prefill_once.LEAST = 1 << 62


KINDS = {"each": {"benchmarks.prefill_once:EachPrefills": ""}, "once": {}}


def make_group(checkpoint: str, logs: Path, extensions: dict[str, str]) -> RolloutGroup:
    config = TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=checkpoint, dtype="float32"),
        rollout=groups.RolloutConfig(
            num_rollout=1, rollout_batch_size=GROUPS, n_samples_per_prompt=SAMPLES
        ),
        engine=groups.EngineConfig(cpu_threads=1, rollout_max_concurrency=GROUPS * SAMPLES),
        parity=groups.ParityConfig(true_on_policy_mode=True),
    )
    hf_config = load_config(checkpoint)
    contract = contract_for(config, hf_config, aligned=True)
    longest = max(PROMPTS) + RESPONSE
    return make_rollout_group(config, hf_config, contract, logs, longest, extensions=extensions)


def requests(prompt: int) -> list[Request]:
    params = SamplingParams(
        temperature=1.0, max_new_tokens=RESPONSE, stop_token_ids=(), ignore_eos=True
    )
    return [
        Request(prompt_ids=tokens(prompt, seed=group), sampling_seed=sample, params=params)
        for group in range(GROUPS)
        for sample in range(SAMPLES)
    ]


def processor_seconds() -> float:
    """Return the processor seconds that all servers have used so far."""
    times = [p.cpu_times() for p in psutil.Process().children(recursive=True)]
    return float(sum(t.user + t.system for t in times))


def sample(group: RolloutGroup, prompt: int) -> tuple[float, float, list[Completion]]:
    """Return seconds, processor seconds, and the sampled responses."""
    group.clients[0].flush_cache()
    busy, started = processor_seconds(), time.perf_counter()
    answers = group.generate(SamplingJob(requests(prompt)))
    return time.perf_counter() - started, processor_seconds() - busy, answers


def compare(servers: dict[str, RolloutGroup], prompt: int, repetitions: int) -> dict[str, Any]:
    runs: dict[str, list[Any]] = take_turns(
        {kind: partial(sample, group, prompt) for kind, group in servers.items()},
        1,
        repetitions,
    )
    said = [[(a.response_ids, a.rollout_log_probs) for a in r[2]] for k in runs for r in runs[k]]
    assert all(each == said[0] for each in said), "the samples are not the same bits"
    pairs = zip(runs["each"], runs["once"], strict=True)
    return {
        "prompt": prompt,
        "computed": {
            kind: [
                GROUPS * SAMPLES * prompt - sum(a.num_cached_tokens for a in r[2])
                for r in runs[kind]
            ]
            for kind in runs
        },
        "speed": median(each[1] / once[1] for each, once in pairs),
        "seconds": {kind: [r[0] for r in runs[kind]] for kind in runs},
        "processor_seconds": {kind: [r[1] for r in runs[kind]] for kind in runs},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", type=int, choices=PROMPTS)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as on_exit:
        checkpoint = Path(directory) / "model"
        make_model(args.layers).causal_lm.save_pretrained(checkpoint)
        servers = {}
        for kind, extensions in KINDS.items():
            servers[kind] = make_group(str(checkpoint), Path(directory) / kind, extensions)
            on_exit.callback(servers[kind].stop)
            servers[kind].launch()
            servers[kind].connect({})
        cases = [args.only] if args.only else PROMPTS
        found = [compare(servers, prompt, args.repetitions) for prompt in cases]
    settings = {
        "layers": args.layers,
        "vocabulary": VOCAB,
        "groups": GROUPS,
        "samples": SAMPLES,
        "response": RESPONSE,
    }
    put_out({"cases": found, **settings, "versions": versions()}, args.json)


if __name__ == "__main__":
    main()
