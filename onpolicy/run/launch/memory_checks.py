"""Whether the processes of a command fit the memory that is free, before any of them starts.

What other programs take is subtracted from what is free.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.errors import ConfigError
from onpolicy.models.size import ModelSize
from onpolicy.rollout.engine_args import CACHE_MARGIN, EngineSpec
from onpolicy.run.launch.process_memory import ProcessMemory, RunMemory
from onpolicy.system.gpus import gpus
from onpolicy.system.memory import free_memory, gib

logger = logging.getLogger(__name__)


def require_run_fits(
    config: TrainConfig, hf_config: PretrainedConfig, spec: EngineSpec, size: ModelSize
) -> None:
    """Say what a run takes. Raises ConfigError, with the sums, if its longest sequence does not fit the
    cache of an engine, or its processes do not fit the memory that is free: of a dry run, which may be
    made on another host, or while something else runs, that is only said."""
    servers = 0 if config.engine.rollout_server_url else config.engine.rollout_num_engines
    if servers:
        require_cache(spec)
    memory = RunMemory(config, hf_config, spec, size)
    processes = memory.with_push(config.cluster.num_ranks, servers)
    require_memory(processes, spec.contract.device, config.dry_run, config.cluster.ray_address)


def require_cache(spec: EngineSpec) -> None:
    """Raise ConfigError if one sequence does not fit the cache that is asked for; say if some wait."""
    needed, tokens = spec.needed_tokens, spec.cache_tokens
    if not tokens:
        return  # as much as a GPU has room for, which its server tells when it has started
    if needed > tokens:
        raise ConfigError(
            f"--sglang-max-total-tokens={tokens}: the longest prompt and response have "
            f"{spec.longest_sequence} tokens, and with {CACHE_MARGIN} that SGLang keeps free they need "
            f"{needed}. Raise it, or leave it out."
        )
    if spec.max_concurrency * needed > tokens:
        logger.info(
            "a server's cache of %d tokens holds %d sequences of %d tokens, the longest that may come; "
            "of %d requests in flight the others wait for room",
            tokens, tokens // needed, spec.longest_sequence, spec.max_concurrency,
        )  # fmt: skip


def require_memory(
    processes: Sequence[ProcessMemory],
    device: str,
    is_dry_run: bool = False,
    ray_address: str = "",
) -> None:
    """Say what the processes take; raise ConfigError, with the sums, if they cannot fit.

    On a CPU they share the memory of this host; on GPUs each has one of its own. Hosts of a cluster, at
    `ray_address`, are asked when it is known what is on which (`host_memory.fitting`).
    """
    for process in processes:
        logger.info("memory of %s", process)
    try:
        if ray_address:
            return
        if device == "cuda":
            free = [gpu.free for gpu in gpus()]
            logger.info("%s", require_gpu(processes, "the fullest GPU", min(free)))
        else:
            logger.info("%s", require_host(processes, "this host", free_memory()))
    except ConfigError as error:
        if not is_dry_run:
            raise
        logger.warning("here and now the run would be refused: %s", error)


def require_gpu(processes: Sequence[ProcessMemory], gpu: str, free: int) -> str:
    """The largest process, in words. Raises ConfigError if it is more than the bytes that are free on
    the GPU."""
    needed = max(process.bytes // process.count for process in processes)
    return _require(processes, needed, "the largest of them", gpu, free)


def require_host(processes: Sequence[ProcessMemory], host: str, free: int) -> str:
    """The sum, in words. Raises ConfigError if it is more than the bytes that are free on the host."""
    return _require(processes, sum(p.bytes for p in processes), "together", host, free)


def _require(
    processes: Sequence[ProcessMemory], needed: int, what: str, where: str, free: int
) -> str:
    if needed > free:
        raise ConfigError(
            f"memory={gib(needed)} GiB {what}: {where} has {gib(free)} GiB free. "
            f"{'; '.join(map(str, processes))}. Choose a smaller model, shorter or fewer sequences, "
            "--activation-checkpointing or --max-tokens-per-gpu, more ranks, GPUs or hosts; or free "
            "some memory."
        )
    return f"{gib(needed)} GiB {what}, and {where} has {gib(free)} GiB free"
