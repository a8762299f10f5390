"""`onpolicy bench rollout`: whole SGLang servers."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from onpolicy.cluster.places import Places
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.config.tools import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.rollout.base import RolloutGroup, SamplingJob
from onpolicy.rollout.seeds import sampling_seed
from onpolicy.run.bench.alternate import Measure, alternate
from onpolicy.run.bench.input_checks import processes
from onpolicy.run.bench.requests import random_prompts, sampling_params
from onpolicy.run.bench.setting import KINDS, setting, settings
from onpolicy.run.cluster import places_on_cluster
from onpolicy.run.engine_specs import make_rollout_group, rollout_spec
from onpolicy.run.memory import RunMemory
from onpolicy.run.placement import placement_of_servers
from onpolicy.types import Request


def bench_rollout(config: BenchConfig) -> dict[str, Any]:
    """Tokens per second of whole SGLang servers, for each kind of operators."""
    hf_config = load_config(config.model.hf_checkpoint)
    train_config, contract = setting(config, hf_config, "aligned")
    tp_size = tensor_parallel_size(config.sglang_args)
    host = train_config.engine.rollout_host
    place = partial(placement_of_servers, config.engines, tp_size, host, contract)
    held = None
    if config.cluster.ray_address:
        longest = config.prompt_len + config.max_new_tokens
        spec = rollout_spec(train_config, hf_config, contract, longest)
        memory = RunMemory(train_config, hf_config, spec, ModelSize.of(hf_config))
        held = partial(processes, config, memory)
    with places_on_cluster(config.cluster, place, config.cpu.cpu_threads, held) as places:
        return _measured(config, hf_config, places)


def _measured(config: BenchConfig, hf_config: PretrainedConfig, places: Places) -> dict[str, Any]:
    requests = _requests(config, hf_config.vocab_size)
    with ExitStack() as on_exit:
        measures: dict[str, Measure] = {}
        for kind in KINDS:
            train_config, contract = setting(config, hf_config, kind)
            logs = Path(config.run_dir) / kind
            longest = config.prompt_len + config.max_new_tokens
            group = make_rollout_group(train_config, hf_config, contract, logs, longest, places)
            on_exit.callback(group.stop)
            group.launch()
            group.connect({})
            measures[kind] = _rollout_measure(group, requests)
        return {
            "what": "rollout",
            "unit": "sampled tokens per second",
            **alternate(measures, config.repetitions),
            **settings(config),
        }


def _requests(config: BenchConfig, vocab_size: int) -> list[Request]:
    params = sampling_params(config)
    return [
        Request(
            prompt_ids=prompt.prompt_ids,
            sampling_seed=sampling_seed("bench", prompt.index),
            params=params,
        )
        for prompt in random_prompts(config, vocab_size)
    ]


def _rollout_measure(group: RolloutGroup, requests: list[Request]) -> Measure:
    num_tokens = sum(request.params.max_new_tokens for request in requests)

    def measure() -> float:
        for client in group.clients:
            client.flush_cache()
        started = time.perf_counter()
        group.generate(SamplingJob(requests))
        return num_tokens / (time.perf_counter() - started)

    return measure
