"""Memory checks of a command's processes before any of them starts.

They are made on this host, or on the hosts of a cluster once a placement is known, against the memory
that other programs leave free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

from onpolicy.cluster.engine_places import RequireRoom
from onpolicy.cluster.hosts import Host
from onpolicy.cluster.placement import Placement
from onpolicy.cluster.session import free_memory_on, gpus_on
from onpolicy.config import TrainConfig
from onpolicy.config.sglang_flags import memory_fraction
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError, ContractError
from onpolicy.models.size import ModelSize
from onpolicy.rollout.engine_args import EngineSpec
from onpolicy.run.launch.engine_specs import rollout_spec
from onpolicy.run.launch.memory_model import RunMemory
from onpolicy.run.launch.process_memory import ProcessMemory
from onpolicy.system.memory import Gpu, free_memory, gib, gpus

logger = logging.getLogger(__name__)

Held = Callable[[int, int], list[ProcessMemory]]
"""A function (ranks of the trainer, servers) -> their processes' memory on one host."""

PlaceOn = Callable[[Sequence[Host]], Placement]

GpusOf = Mapping[Host, Sequence[Gpu]]
"""The result of `gpus_on`: each host's GPUs by number."""

REMEDY = (
    "Choose a smaller model, shorter or fewer sequences, --activation-checkpointing or "
    "--max-tokens-per-gpu, more ranks, GPUs or hosts; or free some memory."
)


@dataclass(frozen=True, slots=True)
class Needs:
    """The memory needs of a command's processes, wherever they are placed."""

    held: Held

    run: RunMemory | None = None
    """The run's own model of its memory, if the command is a run."""

    @staticmethod
    def of(
        config: TrainConfig,
        hf_config: PretrainedConfig,
        contract: NumericsContract,
        longest_sequence: int,
    ) -> Needs:
        """Return the needs of a run whose longest sequence has `longest_sequence` tokens."""
        spec = rollout_spec(config, hf_config, contract, longest_sequence)
        size = ModelSize.of(hf_config, config.model.trust_remote_code, contract.adapter)
        run = RunMemory(config, hf_config, spec, size)
        return Needs(run.with_push, run)


def require_run_fits(
    config: TrainConfig, hf_config: PretrainedConfig, spec: EngineSpec, size: ModelSize
) -> None:
    """Log the memory of a run.

    Raises ConfigError, with the sums, if its longest sequence does not fit an engine's cache, or if its
    processes do not fit the free memory. A dry run only logs the latter, since the run may be made on
    another host or at another time.
    """
    servers = config.engine.num_started
    if servers:
        require_cache(spec)
    run = RunMemory(config, hf_config, spec, size)
    processes = run.with_push(config.cluster.num_ranks, servers)
    processes += [run.controller(), *run.agents()]
    try:
        require_memory(processes, spec.contract.device, config.cluster.ray_address, run)
    except ConfigError as error:
        if not config.dry_run:
            raise
        logger.warning("here and now the run would be refused: %s", error)


def require_cache(spec: EngineSpec) -> None:
    """Raise ConfigError if a sequence does not fit the requested cache; log if requests have to wait."""
    needed, tokens = spec.needed_tokens, spec.cache_tokens
    if not tokens:
        return  # as much as a GPU has room for, which its server tells when it has started
    if needed > tokens:
        raise ConfigError(
            f"--sglang-max-total-tokens={tokens}: the longest prompt and response have "
            f"{spec.longest_sequence} tokens, and with {needed - spec.longest_sequence} that SGLang "
            f"keeps free they need {needed}. Raise it, or leave it out."
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
    ray_address: str = "",
    run: RunMemory | None = None,
) -> None:
    """Log the memory of the processes; raise ConfigError, with the sums, if they cannot fit.

    On a CPU they share the memory of this host. On GPUs each process has one of its own, or a rank and a
    server of `run` share one. Hosts of a cluster, at `ray_address`, are checked once placements are
    known (`fitting`).
    """
    for process in processes:
        logger.info("memory of %s", process)
    if ray_address:
        return
    if device == "cuda":
        is_shared = run is not None and run.is_colocated
        fullest = min(gpu.free for gpu in gpus())
        for line in require_gpu(processes, "the fullest GPU", fullest, run, is_shared=is_shared):
            logger.info("%s", line)
    logger.info("%s", require_host(processes, "this host", free_memory(), device))


def require_host(processes: Sequence[ProcessMemory], host: str, free: int, device: str) -> str:
    """Return the sum of the processes' memory on a host, in words.

    On a CPU it is all of their memory, else the part beside the GPUs. Raises ConfigError if it exceeds
    the host's `free` bytes.
    """
    on_gpus = device == "cuda"
    needed = sum(p.host_bytes if on_gpus else p.bytes for p in processes)
    return _require(processes, needed, "beside GPUs" if on_gpus else "together", host, free)


def require_gpu(
    processes: Sequence[ProcessMemory],
    gpu: str,
    free: int,
    run: RunMemory | None = None,
    *,
    is_shared: bool = False,
) -> list[str]:
    """Return the largest process on a GPU, in words, or everything that a rank and a server of `run`
    hold on a shared one at the same time.

    Raises ConfigError if that exceeds the `free` bytes, with the number of ranks that would suffice, or
    if the server's share is too small.
    """
    moments = run.moments() if run is not None and is_shared else processes
    largest = max(moments, key=lambda process: process.each)
    enough = ""
    if run is not None and largest.each > free and (is_shared or run.trainer().each > free):
        enough = _enough_ranks(run, free)
    line = _require(moments, largest.each, "the largest of them", gpu, free, enough)
    if run is None or not is_shared:
        return [line]
    forecast = [f"memory of a shared GPU {moment}" for moment in moments]
    return [*forecast, line, _require_fraction(run, gpu, free)]


def _enough_ranks(run: RunMemory, free: int) -> str:
    """Return, in words, the number of ranks that would fit GPUs with so many free bytes."""
    number = run.enough_ranks(free)
    if number is None:
        return "No number of ranks would do. "
    stepless = ", or to take no step (`onpolicy verify --no-step`)" * run.config.takes_steps
    return f"{number} ranks would do (--actor-num-gpus-per-node){stepless}. "


def _require_fraction(run: RunMemory, gpu: str, free: int) -> str:
    """Return the servers' share of a shared GPU, in words. Raises ConfigError if weights and the longest
    sequence do not fit it."""
    given, needed = memory_fraction(run.spec.sglang_args), run.static_server()
    fraction = run.spec.memory_fraction if given is None else given
    part = int(fraction * free)
    if needed > part:
        raise ConfigError(
            f"--colocate, --sglang-mem-fraction-static={fraction:g}: a server's weights and the longest "
            f"sequence take {gib(needed)} GiB, and of {gib(free)} GiB that {gpu} has free their part is "
            f"{gib(part)}. Raise it, or --sglang-tp-size, or leave --colocate out."
        )
    return f"servers get {gib(part)} GiB of {gpu} for weights and cache ({fraction:g})"


def _require(
    processes: Sequence[ProcessMemory],
    needed: int,
    what: str,
    where: str,
    free: int,
    enough: str = "",
) -> str:
    if needed > free:
        raise ConfigError(
            f"memory={gib(needed)} GiB {what}: {where} has {gib(free)} GiB free. "
            f"{'; '.join(map(str, processes))}. {enough}{REMEDY}"
        )
    return f"{gib(needed)} GiB {what}, and {where} has {gib(free)} GiB free"


def fitting(
    place: PlaceOn, needs: Needs | None, hosts: Sequence[Host]
) -> tuple[Placement, list[str]]:
    """Return a placement on hosts, and the log lines about it. needs: None to skip memory and GPU
    checks.

    Raises ConfigError if hosts are too few, or if one, or a GPU of one, has too little memory;
    ContractError if a host's GPUs are of another kind than this one's.
    """
    placement = place(hosts)
    lines = placement.describe()
    if needs is None:
        return placement, lines
    if placement.device == "cuda":
        here = [host for host in hosts if host.is_here]
        found = gpus_on(tuple(dict.fromkeys((*here, *placement.hosts))))
        require_same_kind(placement, found)
        lines += require_gpus(placement, needs, found)
    return placement, lines + require_hosts(placement, needs, free_memory_on(placement.hosts))


def require_same_kind(placement: Placement, found: GpusOf) -> None:
    """Raise ContractError if a GPU in use has another compute capability than this host's GPUs, from
    which the contract was made."""
    ours = next((gpus for host, gpus in found.items() if host.is_here), ())
    for host in placement.hosts:
        for number, gpu in enumerate(found[host]):
            if ours and number in placement.gpus(host) and gpu.capability != ours[0].capability:
                raise ContractError(
                    f"{host}: its GPU {number} is {_kind(gpu)}, and this host, from which the contract "
                    f"was made, has {_kind(ours[0])}. All that compute must be of one kind: take that "
                    "host out of the cluster, or start the command on a host like it."
                )


def _kind(gpu: Gpu) -> str:
    return f"{gpu.name} (compute capability {'.'.join(map(str, gpu.capability))})"


def require_gpus(placement: Placement, needs: Needs, found: GpusOf) -> list[str]:
    """Return the memory of the fullest GPU in use on each host, in words.

    Raises ConfigError for the first host whose processes do not see those GPUs, or where one has too
    little free memory.
    """
    lines = []
    for host in placement.hosts:
        taken, there = placement.gpus(host), found[host]
        if max(taken) >= len(there):
            raise ConfigError(
                f"{host}: {len(there)} GPUs are seen there, and its node of the cluster counts num_gpus="
                f"{host.num_gpus}. Join it again with as many as there are (`ray start --num-gpus "
                f"{len(there)}`), or let its processes see all of them (CUDA_VISIBLE_DEVICES)."
            )
        processes, shared = needs.held(*placement.counts(host)), placement.shared_gpus(host)
        for numbers, is_shared in ((shared, True), (taken - shared, False)):
            if numbers:
                fullest = min(numbers, key=lambda number: there[number].free)
                name, free = f"GPU {fullest} of {host}", there[fullest].free
                lines += require_gpu(processes, name, free, needs.run, is_shared=is_shared)
    return lines


def require_hosts(placement: Placement, needs: Needs, free: Mapping[Host, int]) -> list[str]:
    """Return the memory sum of each host, in a line each. free: bytes that new processes may take there.

    Raises ConfigError for the first host whose ranks and servers do not fit.
    """
    return [
        require_host(needs.held(*placement.counts(host)), str(host), free[host], placement.device)
        for host in placement.hosts
    ]


def require_room_of(needs: Needs | None) -> RequireRoom:
    """Return the memory check for engines that move to other hosts. needs: None to check nothing."""

    def require_room(before: Placement, after: Placement) -> None:
        pairs = list(zip(before.engines, after.engines, strict=True))
        new = [slot for old, slot in pairs if old.host.name != slot.host.name]
        if needs is None or not new:
            return
        moved = Placement((), tuple(new))
        if moved.device == "cuda":
            require_gpus(moved, needs, gpus_on(moved.hosts))
        require_hosts(moved, needs, free_memory_on(moved.hosts))

    return require_room
