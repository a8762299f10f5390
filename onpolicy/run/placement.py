"""What each process of a command gets of this host: GPUs, cores, and memory for its cache."""

from __future__ import annotations

import os

import torch
from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.rollout.engine_args import CACHE_MARGIN
from onpolicy.train import distributed

CACHE_BYTES = 2 << 30
"""Memory for the key/value cache of one CPU engine, unless --sglang-max-total-tokens is given."""


def require_gpus(config: TrainConfig) -> None:
    """The trainer's ranks take the first GPUs of this host, the servers those after them, or, with
    --colocate, the first ones too.

    Raises ConfigError if there are not as many.
    """
    engine = config.engine
    ranks, servers = distributed.local_world_size(), engine.rollout_num_engines
    per_server = tensor_parallel_size(config.sglang_args)
    theirs, found = servers * per_server, torch.cuda.device_count()
    needed = max(ranks, theirs) if engine.colocate else ranks + theirs
    if engine.rollout_server_url or needed <= found:
        return
    what = f"{servers} servers x --sglang-tp-size {per_server}"
    if engine.colocate:
        raise ConfigError(
            f"--colocate: {ranks} trainer ranks and {what} = {theirs} GPUs, of which each takes one of "
            f"its own, and this host has {found}. Start fewer ranks (torchrun --nproc-per-node) or "
            "fewer servers."
        )
    share = " or let them share GPUs (--colocate)" if max(ranks, theirs) <= found else ""
    raise ConfigError(
        f"--rollout-num-engines={servers}: {ranks} trainer ranks + {what} = {needed} GPUs, and this "
        f"host has {found}. Start fewer ranks (torchrun --nproc-per-node) or fewer servers{share}."
    )


def share_of_cores(processes: int) -> int:
    """Threads for each of some processes on this host."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def cache_tokens(
    hf_config: PretrainedConfig, contract: NumericsContract, longest_sequence: int, requests: int
) -> int:
    """Tokens for the cache of a CPU engine: as many of `requests` sequences of that length as fit
    CACHE_BYTES, and one in any case. One more than that, since SGLang keeps room to spare when it
    admits a request."""
    one = longest_sequence + CACHE_MARGIN
    fitting = CACHE_BYTES // token_bytes(hf_config, contract)
    return max(one, min((requests + 1) * one, fitting))


def token_bytes(hf_config: PretrainedConfig, contract: NumericsContract) -> int:
    """Bytes of a token's keys and values in all layers."""
    itemsize = getattr(torch, contract.dtype).itemsize
    kinds = contract.shapes.attention
    per_layer = max(kind.kv_heads * (kind.head_dim + kind.value_dim) for kind in kinds)
    size: int = hf_config.num_hidden_layers * per_layer * itemsize
    return size
