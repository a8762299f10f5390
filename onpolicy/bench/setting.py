"""Settings of the measured engines: one kind of operators or the other, with this command's flags."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PretrainedConfig

from onpolicy.cluster.placement import share_of_cores
from onpolicy.config import TrainConfig, groups
from onpolicy.config.sglang_flags import max_total_tokens
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.contract import NumericsContract
from onpolicy.models.size import token_bytes
from onpolicy.outputs.directory import versions
from onpolicy.rollout.engine_args import CACHE_MARGIN, MAX_CONCURRENCY
from onpolicy.run.launch.contracts import contract_for

KINDS = ("aligned", "stock")

DETERMINISTIC = "deterministic"
"""SGLang's own --enable-deterministic-inference, which needs attention kernels of a GPU."""

PART_OF_GPU = 0.25
"""The fraction of a GPU's memory for the cache of each measured server: they share it."""

Backend = groups.TrainBackend


def kinds(config: BenchConfig, device: str) -> tuple[str, ...]:
    """Return the kinds of the measured servers."""
    compares_deterministic = config.what == "decode" and device == "cuda"
    return (*KINDS, DETERMINISTIC) if compares_deterministic else KINDS


def setting(
    config: BenchConfig, hf_config: PretrainedConfig, kind: str, backend: Backend = "fsdp"
) -> tuple[TrainConfig, NumericsContract]:
    """Return the configuration and the contract of an engine."""
    train_config = make_train_config(config, kind, backend)
    contract = contract_for(train_config, hf_config, aligned=kind == "aligned")
    args = (*train_config.sglang_args, *_cache_flags(config, hf_config, contract))
    return replace(train_config, sglang_args=args), contract


def _cache_flags(
    config: BenchConfig, hf_config: PretrainedConfig, contract: NumericsContract
) -> tuple[str, ...]:
    """Return flags that limit a GPU server's cache; SGLang would take all memory."""
    if contract.device != "cuda" or max_total_tokens(config.sglang_args):
        return ()
    one = config.prompt_len + config.max_new_tokens + CACHE_MARGIN
    room = PART_OF_GPU * torch.cuda.get_device_properties(0).total_memory
    prompts, samples = _batch(config)
    tokens = min(prompts * samples * one, int(room) // token_bytes(hf_config, contract))
    return ("--max-total-tokens", str(max(one, tokens)))


def make_train_config(config: BenchConfig, kind: str, backend: Backend = "fsdp") -> TrainConfig:
    """Return the configuration of a run on one kind of operators, with this command's flags."""
    is_aligned = kind == "aligned"
    prompts, samples = _batch(config)
    mode = ("--enable-deterministic-inference",) if kind == DETERMINISTIC else ()
    return TrainConfig(
        model=groups.ModelConfig(
            hf_checkpoint=config.model.hf_checkpoint, dtype=config.model.dtype
        ),
        rollout=groups.RolloutConfig(
            num_rollout=1, rollout_batch_size=prompts, n_samples_per_prompt=samples
        ),
        engine=groups.EngineConfig(
            cpu_threads=config.cpu.cpu_threads,
            rollout_max_concurrency=min(MAX_CONCURRENCY, prompts * samples),
            **asdict(config.engines),
        ),
        cluster=config.cluster,
        trainer=groups.TrainerConfig(
            train_backend=backend, max_tokens_per_gpu=max(config.num_tokens)
        ),
        fallback=groups.FallbackConfig(use_tis=config.what == "loop" and not is_aligned),
        parity=groups.ParityConfig(true_on_policy_mode=is_aligned, parity_policy="warn"),
        operators=config.operators if is_aligned else groups.OperatorsConfig(),
        sglang_args=(*config.sglang_args, *mode),
    )


def _batch(config: BenchConfig) -> tuple[int, int]:
    """Return the prompts of a rollout, and the samples of each."""
    if config.what == "loop":
        return config.num_prompts, config.n_samples_per_prompt
    if config.what in ("rollout", "decode", "agents"):
        return config.num_prompts, 1
    return max(1, max(config.num_tokens) // (config.prompt_len + config.max_new_tokens)), 1


def backends(config: BenchConfig) -> list[Backend]:
    return cast(list[Backend], config.train_backend.split(","))


def settings(config: BenchConfig) -> dict[str, Any]:
    return {
        "hf_checkpoint": Path(config.model.hf_checkpoint).name,
        "dtype": config.model.dtype,
        "repetitions": config.repetitions,
        "num_prompts": config.num_prompts,
        "prompt_len": config.prompt_len,
        "max_new_tokens": config.max_new_tokens,
        "rollout_num_engines": config.engines.rollout_num_engines,
        "cpu_threads": config.cpu.cpu_threads or share_of_cores(1),
        "versions": versions(),
    }
