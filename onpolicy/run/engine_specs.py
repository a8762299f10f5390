"""What SGLang servers are started with: those of a run's rollout, and the one of `onpolicy serve`."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.config.groups import ServerConfig
from onpolicy.config.secrets import reveal
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.config.tools import ServeConfig
from onpolicy.contract import NumericsContract
from onpolicy.rollout.base import RolloutGroup
from onpolicy.rollout.engine_args import EngineSpec
from onpolicy.rollout.sglang import SglangGroup
from onpolicy.run.colocation import require_shareable
from onpolicy.run.placement import cache_tokens, require_gpus, share_of_cores
from onpolicy.train import distributed


def make_rollout_group(
    config: TrainConfig, hf_config: PretrainedConfig, contract: NumericsContract, logs: Path
) -> RolloutGroup:
    """The rollout's servers, not started yet."""
    return SglangGroup(config.engine, rollout_spec(config, hf_config, contract), logs)


def rollout_spec(
    config: TrainConfig, hf_config: PretrainedConfig, contract: NumericsContract
) -> EngineSpec:
    """What each of the rollout's servers is. Raises ConfigError if GPUs are too few or too small."""
    engine = config.engine
    if contract.device == "cuda":
        require_gpus(config)
    if engine.colocate:
        require_shareable(config, contract)
    return replace(
        _spec(config, engine, engine.rollout_num_engines, hf_config, contract),
        max_concurrency=engine.rollout_max_concurrency,
        first_gpu=0 if engine.colocate else distributed.local_world_size(),
        shares_gpus=engine.colocate,
        weight_format="" if contract.is_aligned else engine.rollout_weight_format,
        returns_routed_experts=replays_routing(config, contract),
    )


def serve_spec(
    config: ServeConfig, hf_config: PretrainedConfig, contract: NumericsContract
) -> EngineSpec:
    """What the server of `onpolicy serve` is."""
    spec = _spec(config, config.server, 1, hf_config, contract)
    return replace(spec, serves_text=config.serves_text)


def _spec(
    config: TrainConfig | ServeConfig,
    server: ServerConfig,
    num_servers: int,
    hf_config: PretrainedConfig,
    contract: NumericsContract,
) -> EngineSpec:
    num_processes = num_servers * tensor_parallel_size(config.sglang_args)
    return EngineSpec(
        hf_checkpoint=config.model.hf_checkpoint,
        contract=contract,
        host=server.rollout_host,
        api_key=reveal("--rollout-api-key", server.rollout_api_key) or secrets.token_hex(24),
        seed=config.seed,
        num_threads=server.cpu_threads or share_of_cores(num_processes),
        cache_tokens=cache_tokens(hf_config, contract),
        trust_remote_code=config.model.trust_remote_code,
        sglang_args=config.sglang_args,
    )


def replays_routing(config: TrainConfig, contract: NumericsContract) -> bool:
    """Whether the trainer is to take the experts that the rollout took; aligned engines agree."""
    return config.fallback.use_rollout_routing_replay and not contract.is_aligned
