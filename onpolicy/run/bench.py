"""Operators, or training engines, side by side: alternating measurements, medians, ratios."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from transformers import PretrainedConfig

from onpolicy.config import TrainConfig, groups
from onpolicy.config.tools import BenchConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.weight_files import require_fit
from onpolicy.outputs.directory import versions
from onpolicy.rollout.base import SamplingJob
from onpolicy.rollout.engine_args import CONTEXT_MARGIN, MAX_CONCURRENCY, EngineSpec
from onpolicy.rollout.flag_check import FlagCheck
from onpolicy.rollout.seeds import sampling_seed
from onpolicy.run.contracts import contract_for
from onpolicy.run.engine_specs import make_rollout_group, rollout_spec
from onpolicy.run.input_checks import check_layout
from onpolicy.run.memory import (
    ModelSize,
    ProcessMemory,
    require_cache,
    require_memory,
    server_memory,
    trainer_memory,
)
from onpolicy.run.placement import share_of_cores
from onpolicy.train import Trainer, make_trainer
from onpolicy.types import (
    Completion,
    FinishReason,
    Prompt,
    Request,
    Sample,
    SamplingParams,
    TrainSample,
)

KINDS = ("aligned", "stock")

Backend = groups.TrainBackend

Measure = Callable[[], float]
"""Runs once and returns tokens per second."""


def alternate(measures: Mapping[str, Measure], repetitions: int) -> dict[str, Any]:
    """Warm both up, measure in turns, and compare medians: each by its name, and `ratio`."""
    for measure in measures.values():
        measure()
    runs: dict[str, list[float]] = {kind: [] for kind in measures}
    for _ in range(repetitions):
        for kind, measure in measures.items():
            runs[kind].append(measure())
    result: dict[str, Any] = {
        kind: {"tokens_per_second": median(values), "runs": values} for kind, values in runs.items()
    }
    ratios = [first / second for first, second in zip(*runs.values(), strict=True)]
    return {**result, "ratio": median(ratios)}


def bench_rollout(config: BenchConfig) -> dict[str, Any]:
    """Tokens per second of a whole SGLang server, for each kind of operators."""
    hf_config = load_config(config.model.hf_checkpoint)
    rng = random.Random(0)
    prompts = [
        [rng.randrange(hf_config.vocab_size) for _ in range(config.prompt_len)]
        for _ in range(config.num_prompts)
    ]
    with ExitStack() as on_exit:
        measures: dict[str, Measure] = {}
        for kind in KINDS:
            train_config, contract = _setting(config, hf_config, kind)
            logs = Path(config.run_dir) / kind
            longest = config.prompt_len + config.max_new_tokens
            group = make_rollout_group(train_config, hf_config, contract, logs, longest)
            on_exit.callback(group.stop)
            group.launch()
            group.connect({})
            measures[kind] = _rollout_measure(group, prompts, config.max_new_tokens)
        return {
            "what": "rollout",
            "unit": "sampled tokens per second",
            **alternate(measures, config.repetitions),
            **_settings(config),
        }


def _rollout_measure(group: Any, prompts: list[list[int]], max_new_tokens: int) -> Measure:
    params = SamplingParams(
        temperature=1.0, max_new_tokens=max_new_tokens, stop_token_ids=(), ignore_eos=True
    )
    requests = [
        Request(prompt_ids=prompt, sampling_seed=sampling_seed("bench", i), params=params)
        for i, prompt in enumerate(prompts)
    ]

    def measure() -> float:
        for client in group.clients:
            client.flush_cache()
        started = time.perf_counter()
        group.generate(SamplingJob(requests))
        return len(requests) * max_new_tokens / (time.perf_counter() - started)

    return measure


def _backends(config: BenchConfig) -> list[Backend]:
    return cast(list[Backend], config.train_backend.split(","))


def check_inputs(config: BenchConfig) -> None:
    """Raise ConfigError for whatever an engine could not run; starts nothing."""
    hf_config = load_config(config.model.hf_checkpoint)
    length, context = config.prompt_len + config.max_new_tokens, hf_config.max_position_embeddings
    if length + CONTEXT_MARGIN > context:
        raise ConfigError(
            f"--max-new-tokens={config.max_new_tokens}: with --prompt-len {config.prompt_len} and "
            f"{CONTEXT_MARGIN} tokens that SGLang keeps free it does not fit the model's context of "
            f"{context}. Lower one of the two."
        )
    if config.what == "step" and (not config.num_tokens or min(config.num_tokens) < length):
        raise ConfigError(
            f"--num-tokens={' '.join(map(str, config.num_tokens))}: a sequence has --prompt-len + "
            f"--max-new-tokens = {length} tokens, and at least one must fit. Give larger numbers."
        )
    for backend in _backends(config):
        check_layout(make_train_config(config, "aligned", backend))
    train_config, contract = _setting(config, hf_config, "aligned")
    spec = rollout_spec(train_config, hf_config, contract, length)
    with FlagCheck(spec) as flags:
        require_fit(config.model.hf_checkpoint, hf_config)
        require_memory(_processes(config, train_config, hf_config, spec), contract.device)
        flags.require_passed()


def _processes(
    config: BenchConfig, train_config: TrainConfig, hf_config: PretrainedConfig, spec: EngineSpec
) -> list[ProcessMemory]:
    """Both sides are there at once: two servers, or two trainers in one process."""
    size = ModelSize.of(hf_config)
    if config.what == "rollout":
        require_cache(spec)
        return [server_memory(spec, size, hf_config, servers=2)]
    return [replace(trainer_memory(train_config, hf_config, spec, size, ranks=1), count=2)]


def bench_step(config: BenchConfig) -> dict[str, Any]:
    """Tokens per second of an optimizer step, for growing numbers of tokens.

    Of one engine on both kinds of operators, or of two engines on aligned ones.
    """
    threads = config.cpu.cpu_threads or share_of_cores(1)
    hf_config = load_config(config.model.hf_checkpoint)
    backends = _backends(config)
    sides: dict[str, tuple[Backend, str]] = {name: (name, "aligned") for name in backends}
    if len(backends) == 1:
        sides = {kind: (backends[0], kind) for kind in KINDS}
    trainers = {
        side: make_trainer(*_setting(config, hf_config, kind, backend), threads)
        for side, (backend, kind) in sides.items()
    }
    by_tokens = []
    for num_tokens in config.num_tokens:
        measures = {
            side: _step_measure(trainer, num_tokens, config, threads if side == "stock" else 1)
            for side, trainer in trainers.items()
        }
        result = alternate(measures, config.repetitions)
        for side in trainers:
            result[side]["seconds"] = num_tokens / result[side]["tokens_per_second"]
        by_tokens.append({"num_tokens": num_tokens, **result})
    return {
        "what": "step",
        "unit": "trained tokens per second",
        **{side: by_tokens[-1][side] for side in trainers},
        "ratio": by_tokens[-1]["ratio"],
        "by_num_tokens": by_tokens,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **_settings(config),
    }


def _step_measure(
    trainer: Trainer, num_tokens: int, config: BenchConfig, torch_threads: int
) -> Measure:
    import torch

    rng = random.Random(0)
    length = config.prompt_len + config.max_new_tokens
    vocab_size = load_config(config.model.hf_checkpoint).vocab_size
    samples = [
        TrainSample(
            sample=_made_up([rng.randrange(vocab_size) for _ in range(length)], config),
            advantage=rng.uniform(-1, 1),
        )
        for _ in range(num_tokens // length)
    ]

    def measure() -> float:
        # The aligned operators bring threads of their own and keep torch at one.
        torch.set_num_threads(torch_threads)
        started = time.perf_counter()
        trainer.train(samples, step=0, rates=[0.0])
        return len(samples) * length / (time.perf_counter() - started)

    return measure


def _made_up(token_ids: list[int], config: BenchConfig) -> Sample:
    completion = Completion(
        response_ids=token_ids[config.prompt_len :],
        rollout_log_probs=[-1.0] * config.max_new_tokens,
        finish_reason=FinishReason.LENGTH,
        weight_version="0",
        num_cached_tokens=0,
    )
    prompt = Prompt(index=0, prompt_ids=token_ids[: config.prompt_len], label="", text="")
    return Sample(prompt=prompt, sample_index=0, completion=completion)


def _setting(
    config: BenchConfig, hf_config: PretrainedConfig, kind: str, backend: Backend = "fsdp"
) -> tuple[TrainConfig, NumericsContract]:
    """What an engine is made from."""
    train_config = make_train_config(config, kind, backend)
    return train_config, contract_for(train_config, hf_config, aligned=kind == "aligned")


def make_train_config(config: BenchConfig, kind: str, backend: Backend = "fsdp") -> TrainConfig:
    """A run on one kind of operators, with this command's flags."""
    is_aligned, length = kind == "aligned", config.prompt_len + config.max_new_tokens
    return TrainConfig(
        model=groups.ModelConfig(
            hf_checkpoint=config.model.hf_checkpoint, dtype=config.model.dtype
        ),
        rollout=groups.RolloutConfig(
            num_rollout=1,
            rollout_batch_size=max(1, max(config.num_tokens) // length),
            n_samples_per_prompt=1,
        ),
        engine=groups.EngineConfig(
            cpu_threads=config.cpu.cpu_threads,
            rollout_max_concurrency=min(MAX_CONCURRENCY, config.num_prompts),
        ),
        trainer=groups.TrainerConfig(
            train_backend=backend, max_tokens_per_gpu=max(config.num_tokens)
        ),
        parity=groups.ParityConfig(true_on_policy_mode=is_aligned, parity_policy="warn"),
        operators=config.operators if is_aligned else groups.OperatorsConfig(),
        sglang_args=config.sglang_args,
    )


def _settings(config: BenchConfig) -> dict[str, Any]:
    return {
        "hf_checkpoint": Path(config.model.hf_checkpoint).name,
        "dtype": config.model.dtype,
        "repetitions": config.repetitions,
        "num_prompts": config.num_prompts,
        "prompt_len": config.prompt_len,
        "max_new_tokens": config.max_new_tokens,
        "cpu_threads": config.cpu.cpu_threads or share_of_cores(1),
        "versions": versions(),
    }
