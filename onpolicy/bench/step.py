"""`onpolicy bench step`: optimizer steps."""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from resource import RUSAGE_CHILDREN, RUSAGE_SELF
from typing import Any

from onpolicy.bench.own_process import Ask, MakeTrainer, mkl_mode, trainer_apart
from onpolicy.bench.profile import Seconds, profile, table
from onpolicy.bench.setting import KINDS, Backend, backends, setting, settings
from onpolicy.bench.stopwatch import watching
from onpolicy.bench.turns import Measure, compare_in_turns
from onpolicy.cluster.placement import share_of_cores
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.system.number_arrays import Floats, Ints
from onpolicy.training import make_trainer
from onpolicy.training.advantages import RewardEstimator
from onpolicy.training.policy_trainer import PolicyTrainer
from onpolicy.trajectory import Completion, FinishReason, Span, Trajectory
from onpolicy.types import Prompt, Sample


def bench_step(config: BenchConfig) -> dict[str, Any]:
    """Return tokens per second of an optimizer step, for growing numbers of tokens.

    It compares one engine on both kinds of operators, or two engines on aligned ones.
    """
    threads = config.cpu.cpu_threads or share_of_cores(1)
    names = backends(config)
    sides: dict[str, tuple[Backend, str]] = {name: (name, "aligned") for name in names}
    if len(names) == 1:
        sides = {kind: (names[0], kind) for kind in KINDS}
    with ExitStack() as on_exit:
        asks = {
            side: _ask(partial(_make, config, threads, backend, kind), kind, on_exit)
            for side, (backend, kind) in sides.items()
        }
        by_tokens = [
            _measured(asks, num_tokens, config, threads) for num_tokens in config.num_tokens
        ]
        modes = {side: ask(mkl_mode) for side, ask in asks.items()}
    peaks = [resource.getrusage(who).ru_maxrss for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    return {
        "what": "step",
        "unit": "trained tokens per second",
        **{side: by_tokens[-1][side] for side in asks},
        "ratio": by_tokens[-1]["ratio"],
        "by_num_tokens": by_tokens,
        "peak_memory_mib": sum(peaks) / 1024,
        "MKL_CBWR": modes,
        **settings(config),
    }


def _make(config: BenchConfig, threads: int, backend: Backend, kind: str) -> PolicyTrainer:
    rewards = RewardEstimator("reinforce")  # independent of the other samples
    hf_config = load_config(config.model.hf_checkpoint)
    return make_trainer(*setting(config, hf_config, kind, backend), threads, rewards)


def _ask(make: MakeTrainer, kind: str, on_exit: ExitStack) -> Ask:
    """Return a function that calls a side's trainer: in this process, or, stock on a CPU, in its
    own."""
    import torch

    if kind == "stock" and not torch.cuda.is_available():
        return on_exit.enter_context(trainer_apart(make))
    trainer = make()
    return lambda function: function(trainer)


def _measured(
    asks: Mapping[str, Ask], num_tokens: int, config: BenchConfig, threads: int
) -> dict[str, Any]:
    """Measure both sides in turns on so many tokens; a profile is a separate measurement."""
    given: dict[str, dict[str, Any]] = {
        side: {
            "num_tokens": num_tokens,
            "config": config,
            "torch_threads": threads if side == "stock" else 1,
        }
        for side in asks
    }
    measures = {side: partial(ask, partial(_step, **given[side])) for side, ask in asks.items()}
    result = compare_in_turns(measures, config.repetitions)
    for side in asks:
        result[side]["seconds"] = num_tokens / result[side]["tokens_per_second"]
    if config.profile:
        watched = {
            side: partial(ask, partial(_watched_step, **given[side])) for side, ask in asks.items()
        }
        result["profile"] = profile(watched, config.repetitions)
        print(f"{num_tokens} tokens", file=sys.stderr)
        print(table(result["profile"], list(asks)), file=sys.stderr)
    return {"num_tokens": num_tokens, **result}


def _step(trainer: PolicyTrainer, **given: Any) -> float:
    return step_measure(trainer, **given)()


def _watched_step(trainer: PolicyTrainer, config: BenchConfig, **given: Any) -> Seconds:
    measure = step_measure(trainer, config=config, **given)
    vocab_size = load_config(config.model.hf_checkpoint).vocab_size
    with watching(trainer, vocab_size) as watch:
        measure()
    return dict(watch.seconds)


def step_measure(
    trainer: PolicyTrainer,
    num_tokens: int,
    config: BenchConfig,
    torch_threads: int,
    rate: float = 0.0,
) -> Measure:
    """Return a function that takes one optimizer step on made-up samples, at a negligible learning
    rate."""
    import torch

    rng = random.Random(0)
    length = config.prompt_len + config.max_new_tokens
    vocab_size = load_config(config.model.hf_checkpoint).vocab_size
    samples = [
        replace(
            _made_up([rng.randrange(vocab_size) for _ in range(length)], config, rng),
            group=number,
            episode=number,
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


def _made_up(token_ids: list[int], config: BenchConfig, rng: random.Random) -> Sample:
    completion = Completion(
        response_ids=Ints(token_ids[config.prompt_len :]),
        rollout_log_probs=Floats([-1.0] * config.max_new_tokens),
        finish_reason=FinishReason.LENGTH,
        weight_version=0,
        num_cached_tokens=0,
        spans=(Span(version=0, start=0, end=config.max_new_tokens),),
    )
    prompt = Prompt(index=0, prompt_ids=token_ids[: config.prompt_len], label="", text="")
    trajectory = Trajectory.begin(prompt.prompt_ids).plus(completion, temperature=1.0)
    reward = rng.uniform(-1, 1)
    return Sample(prompt=prompt, sample_index=0, trajectory=trajectory, reward=reward)
