"""`onpolicy bench step`: optimizer steps."""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.bench.profile import Seconds, profile, table
from benchmarks.bench.setting import KINDS, Backend, backends, setting, settings
from benchmarks.bench.stopwatch import watching
from benchmarks.bench.turns import Measure, compare_in_turns
from onpolicy.config.tools import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch.host_shares import share_of_cores
from onpolicy.train import make_trainer
from onpolicy.train.advantages import RewardEstimator
from onpolicy.train.policy_trainer import PolicyTrainer
from onpolicy.trajectory import Completion, FinishReason, Span, Trajectory
from onpolicy.types import Prompt, Sample, TrainSample


def bench_step(config: BenchConfig) -> dict[str, Any]:
    """Tokens per second of an optimizer step, for growing numbers of tokens.

    Of one engine on both kinds of operators, or of two engines on aligned ones.
    """
    threads = config.cpu.cpu_threads or share_of_cores(1)
    hf_config = load_config(config.model.hf_checkpoint)
    names = backends(config)
    sides: dict[str, tuple[Backend, str]] = {name: (name, "aligned") for name in names}
    if len(names) == 1:
        sides = {kind: (names[0], kind) for kind in KINDS}
    rewards = RewardEstimator("reinforce")  # a sample's own, whatever the others have
    trainers = {
        side: make_trainer(*setting(config, hf_config, kind, backend), threads, rewards)
        for side, (backend, kind) in sides.items()
    }
    by_tokens = [
        _measured(trainers, num_tokens, config, threads) for num_tokens in config.num_tokens
    ]
    return {
        "what": "step",
        "unit": "trained tokens per second",
        **{side: by_tokens[-1][side] for side in trainers},
        "ratio": by_tokens[-1]["ratio"],
        "by_num_tokens": by_tokens,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **settings(config),
    }


def _measured(
    trainers: Mapping[str, PolicyTrainer], num_tokens: int, config: BenchConfig, threads: int
) -> dict[str, Any]:
    """Both sides in turns on so many tokens; a profile is a measurement of its own."""
    measures = {
        side: step_measure(trainer, num_tokens, config, threads if side == "stock" else 1)
        for side, trainer in trainers.items()
    }
    result = compare_in_turns(measures, config.repetitions)
    for side in trainers:
        result[side]["seconds"] = num_tokens / result[side]["tokens_per_second"]
    if config.profile:
        vocab_size = load_config(config.model.hf_checkpoint).vocab_size
        watched = {
            side: _watched(trainer, measures[side], vocab_size)
            for side, trainer in trainers.items()
        }
        result["profile"] = profile(watched, config.repetitions)
        print(f"{num_tokens} tokens", file=sys.stderr)
        print(table(result["profile"], list(trainers)), file=sys.stderr)
    return {"num_tokens": num_tokens, **result}


def step_measure(
    trainer: PolicyTrainer,
    num_tokens: int,
    config: BenchConfig,
    torch_threads: int,
    rate: float = 0.0,
    told: bool = True,
    lag: int = 0,
) -> Measure:
    """One optimizer step on made-up samples, at a learning rate that changes nothing by itself; told:
    which come with entropies, as aligned engines tell them; lag: pushes since they were sampled."""
    import torch

    rng = random.Random(0)
    length = config.prompt_len + config.max_new_tokens
    vocab_size = load_config(config.model.hf_checkpoint).vocab_size
    samples = [
        TrainSample(
            sample=_made_up([rng.randrange(vocab_size) for _ in range(length)], config, rng, told),
            group=number,
            episode=number,
            policy_version=lag or None,
        )
        for number in range(num_tokens // length)
    ]

    def measure() -> float:
        # The aligned operators bring threads of their own and keep torch at one.
        torch.set_num_threads(torch_threads)
        started = time.perf_counter()
        trainer.train(samples, step=0, rates=[rate])
        return len(samples) * length / (time.perf_counter() - started)

    return measure


def _watched(trainer: PolicyTrainer, measure: Measure, vocab_size: int) -> Callable[[], Seconds]:
    def watched() -> Seconds:
        with watching(trainer, vocab_size) as watch:
            measure()
        return watch.seconds

    return watched


def _made_up(token_ids: list[int], config: BenchConfig, rng: random.Random, told: bool) -> Sample:
    completion = Completion(
        response_ids=token_ids[config.prompt_len :],
        rollout_log_probs=[-1.0] * config.max_new_tokens,
        finish_reason=FinishReason.LENGTH,
        weight_version=0,
        num_cached_tokens=0,
        spans=(Span(version=0, start=0, end=config.max_new_tokens),),
        entropy=[float(i) for i in token_ids[config.prompt_len :]] if told else [],
    )
    prompt = Prompt(index=0, prompt_ids=token_ids[: config.prompt_len], label="", text="")
    trajectory = Trajectory.begin(prompt.prompt_ids).plus(completion, temperature=1.0)
    reward = rng.uniform(-1, 1)
    return Sample(prompt=prompt, sample_index=0, trajectory=trajectory, reward=reward)
