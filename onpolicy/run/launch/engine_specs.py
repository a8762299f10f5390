"""The specs of SGLang servers: of a run's rollout, and of `onpolicy serve`."""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig

from onpolicy.cluster.engine_host import Places, RequireRoom, make_server
from onpolicy.cluster.placement import Placement, placement_here, share_of_cores
from onpolicy.config import TrainConfig
from onpolicy.config.groups import EngineConfig, ServerConfig
from onpolicy.config.groups.agent_flags import has_agent
from onpolicy.config.secrets import reveal
from onpolicy.config.sglang_flags import max_total_tokens, tensor_parallel_size
from onpolicy.config.tool_flags import ServeConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.models.size import ModelSize, state_bytes, token_bytes
from onpolicy.ops.backends import require_servable
from onpolicy.ops.machine import Machine
from onpolicy.rollout.base import RolloutGroup
from onpolicy.rollout.engine_args import CACHE_MARGIN, MAX_CONCURRENCY, EngineSpec
from onpolicy.rollout.sglang import SglangGroup
from onpolicy.run.launch.memory import RunMemory

CACHE_BYTES = 2 << 30
"""The size of a CPU engine's KV cache, in bytes, unless --sglang-max-total-tokens is given; also of the
states of recurrent layers."""

STATES = 3
"""The states that SGLang counts for a running request: its own, the one that it began with and one that
it leaves in the cache (KVCacheConfigurator._calculate_mamba_ratio)."""


def make_rollout_group(
    config: TrainConfig,
    hf_config: PretrainedConfig,
    contract: NumericsContract,
    logs: Path,
    longest_sequence: int = 0,
    places: Places | None = None,
    extensions: Mapping[str, str] | None = None,
) -> RolloutGroup:
    """Return the rollout's servers, not started yet; without `places`, all on this host."""
    spec = rollout_spec(config, hf_config, contract, longest_sequence)
    places = places or places_in(placement_here(config, contract), config)
    specs = places.specs(replace(spec, extensions=extensions or {})) or [spec]
    make = partial(make_server, elsewhere=places.elsewhere)
    return SglangGroup(config.engine, specs, logs, make_server=make)


def places_in(
    placement: Placement, config: TrainConfig, require_room: RequireRoom | None = None
) -> Places:
    """Return the places of a run's engines."""
    engine = config.engine
    return Places(
        placement,
        cpu_threads=engine.cpu_threads,
        colocate=engine.colocate,
        require_room=require_room,
    )


def rollout_spec(
    config: TrainConfig,
    hf_config: PretrainedConfig,
    contract: NumericsContract,
    longest_sequence: int = 0,
) -> EngineSpec:
    """Return the spec of the rollout's servers, before they are placed. The cache holds at least a
    sequence of `longest_sequence` tokens, or of the model's context if that is 0. Raises
    ConfigError if GPUs are to be shared and there are none, or if SGLang lacks a package."""
    engine = config.engine
    requests = engine.rollout_max_concurrency
    spec = replace(
        _spec(config, engine, hf_config, contract, longest_sequence, requests),
        weight_format="" if contract.is_aligned else engine.rollout_weight_format,
        returns_routed_experts=replays_routing(config, contract),
        digests_rows=config.parity.parity_check == "full" and contract.is_aligned,
        serves_text=has_agent(config.agent),  # a stop string needs a tokenizer
    )
    if not engine.colocate:
        return spec
    if contract.device != "cuda":
        raise ConfigError(
            "--colocate: this machine has no GPU that a server and the trainer could share; on a CPU "
            "they share cores and memory anyway. Leave it out."
        )
    size = ModelSize.of(
        hf_config, config.model.trust_remote_code, contract.adapter, config.model.tower_of
    )
    gpu_bytes = torch.cuda.get_device_properties(0).total_memory
    fraction = RunMemory(config, hf_config, spec, size).fraction(gpu_bytes)
    return replace(spec, memory_fraction=fraction)


def serve_spec(
    config: ServeConfig, hf_config: PretrainedConfig, contract: NumericsContract
) -> EngineSpec:
    """Return the spec of the server of `onpolicy serve`. Raises ConfigError if SGLang lacks a
    package, or if clients would get the key of runs."""
    spec = _spec(config, config.server, hf_config, contract)
    given = reveal("--client-api-key", config.client_api_key)
    if given and given == spec.api_key:
        raise ConfigError(
            "--client-api-key=...: is the key that --rollout-api-key gives to runs, which may change "
            "weights. Give another, or leave the flag out."
        )
    return replace(
        spec,
        client_api_key="" if spec.admin_api_key else given or secrets.token_hex(24),
        serves_text=config.serves_text,
        digests_rows=config.row_digests,
    )


def _spec(
    config: TrainConfig | ServeConfig,
    server: ServerConfig,
    hf_config: PretrainedConfig,
    contract: NumericsContract,
    longest_sequence: int = 0,
    max_concurrency: int = MAX_CONCURRENCY,
) -> EngineSpec:
    if not (isinstance(server, EngineConfig) and server.rollout_server_url):
        require_servable(contract.backend, Machine.here())
    num_servers = server.rollout_num_engines if isinstance(server, EngineConfig) else 1
    num_processes = num_servers * tensor_parallel_size(config.sglang_args)
    asked = max_total_tokens(config.sglang_args)
    if asked is None and contract.device == "cpu":  # on a GPU SGLang chooses
        one = (longest_sequence or hf_config.max_position_embeddings) + CACHE_MARGIN
        asked = cache_tokens(hf_config, contract, one, max_concurrency)
    return EngineSpec(
        hf_checkpoint=config.model.hf_checkpoint,
        contract=contract.of_engine,
        host=server.rollout_host,
        api_key=reveal("--rollout-api-key", server.rollout_api_key) or secrets.token_hex(24),
        seed=config.seed,
        num_threads=server.cpu_threads or share_of_cores(num_processes),
        max_concurrency=max_concurrency,
        longest_sequence=longest_sequence,
        cache_tokens=asked or 0,
        state_slots=state_slots(hf_config, contract, max_concurrency),
        trust_remote_code=config.model.trust_remote_code,
        sglang_args=config.sglang_args,
    )


def cache_tokens(
    hf_config: PretrainedConfig, contract: NumericsContract, one: int, requests: int
) -> int:
    """Return the number of tokens in the KV cache of a CPU engine. It holds as many of `requests`
    sequences of `one` tokens each as fit CACHE_BYTES, and at least one. There is room for one more
    than `requests`, since SGLang keeps some free when it admits a request."""
    fitting = CACHE_BYTES // token_bytes(hf_config, contract)
    return max(one, min((requests + 1) * one, fitting))


def state_slots(hf_config: PretrainedConfig, contract: NumericsContract, requests: int) -> int:
    """Return the number of states in a CPU engine, 0 where the model has none: of `requests` requests
    and one more, or as many as fit CACHE_BYTES, which are then those that run at once."""
    if contract.device != "cpu" or not contract.shapes.delta:
        return 0
    fitting = CACHE_BYTES // (STATES * state_bytes(hf_config, contract))
    return STATES * max(1, min(requests + 1, fitting))


def replays_routing(config: TrainConfig, contract: NumericsContract) -> bool:
    """Return whether the trainer replays the rollout's expert choices; aligned engines agree anyway."""
    return config.fallback.use_rollout_routing_replay and not contract.is_aligned
