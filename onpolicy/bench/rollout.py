"""`onpolicy bench rollout`: whole SGLang servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from onpolicy.bench.input_checks import processes
from onpolicy.bench.own_process import as_users_start_it
from onpolicy.bench.requests import random_requests
from onpolicy.bench.setting import kinds, setting, settings
from onpolicy.bench.turns import Measure, compare_in_turns
from onpolicy.cluster.placement import placement_of_servers
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.rollout.base import RolloutGroup, SamplingJob
from onpolicy.run.launch.cluster_engines import Needs, places_on_cluster
from onpolicy.run.launch.engine_specs import make_rollout_group, rollout_spec
from onpolicy.run.launch.memory import RunMemory
from onpolicy.types import Request


def bench_rollout(config: BenchConfig) -> dict[str, Any]:
    """Return tokens per second of whole SGLang servers, for each kind of operators."""
    requests = random_requests(config, load_config(config.model.hf_checkpoint).vocab_size)
    with servers(config) as (groups, _):
        measures = {kind: rollout_measure(group, requests) for kind, group in groups.items()}
        return {
            "what": "rollout",
            "unit": "sampled tokens per second",
            **compare_in_turns(measures, config.repetitions),
            **settings(config),
        }


@contextmanager
def servers(config: BenchConfig) -> Iterator[tuple[dict[str, RolloutGroup], int]]:
    """Yield servers of each kind of operators, side by side, and the number of tokens in each one's
    cache."""
    hf_config = load_config(config.model.hf_checkpoint)
    train_config, contract = setting(config, hf_config, "aligned")
    longest = config.prompt_len + config.max_new_tokens
    spec = rollout_spec(train_config, hf_config, contract, longest)
    tp_size = tensor_parallel_size(config.sglang_args)
    host = train_config.engine.rollout_host
    place = partial(placement_of_servers, config.engines, tp_size, host, contract)
    needs = None
    if config.cluster.ray_address:
        memory = RunMemory(train_config, hf_config, spec, ModelSize.of(hf_config))
        needs = Needs(partial(processes, config, memory))
    with (
        places_on_cluster(config.cluster, place, config.cpu.cpu_threads, needs) as places,
        ExitStack() as on_exit,
    ):
        groups: dict[str, RolloutGroup] = {}
        for kind in kinds(config, contract.device):
            of_kind, contract = setting(config, hf_config, kind)
            logs = Path(config.run_dir) / kind
            group = make_rollout_group(of_kind, hf_config, contract, logs, longest, places)
            on_exit.callback(group.stop)
            with as_users_start_it(kind):
                group.launch()
            groups[kind] = group
        for group in groups.values():
            group.connect({})
        yield groups, spec.cache_tokens


def rollout_measure(group: RolloutGroup, requests: list[Request]) -> Measure:
    num_tokens = sum(request.params.max_new_tokens for request in requests)

    def measure() -> float:
        for client in group.clients:
            client.flush_cache()
        started = time.perf_counter()
        group.generate(SamplingJob(requests))
        return num_tokens / (time.perf_counter() - started)

    return measure
