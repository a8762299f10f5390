"""The share of its host that each process of a command gets: GPUs and cores."""

from __future__ import annotations

import os
from collections.abc import Sequence

from onpolicy.cluster.hosts import Host, this_host
from onpolicy.cluster.placement import Placement, place, place_engines, place_trainer
from onpolicy.config import TrainConfig
from onpolicy.config.groups import EngineCountConfig, ServerConfig
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError, ContractError
from onpolicy.system.memory import num_gpus


def placement_of(
    config: TrainConfig, contract: NumericsContract, hosts: Sequence[Host]
) -> Placement:
    """Return the placement of ranks and engines. Raises ConfigError with the sum that does not fit."""
    per_engine = tensor_parallel_size(config.sglang_args)
    if config.cluster.actor_num_gpus_per_node:
        _require_device(contract, hosts)
    _require_gpus_if_counted(config.engine, contract, hosts)
    placement = place(config.cluster, config.engine, per_engine, contract.device, hosts)
    _require_device(contract, placement.hosts)
    require_reach(config, placement)
    return placement


def placement_of_servers(
    count: EngineCountConfig,
    per_engine: int,
    rollout_host: str,
    contract: NumericsContract,
    hosts: Sequence[Host],
) -> Placement:
    """Return the placement of servers without a trainer; raises as `placement_of` does."""
    _require_gpus_if_counted(count, contract, hosts)
    placement = place_engines(count.num_started, per_engine, contract.device, hosts)
    _require_device(contract, placement.hosts)
    _require_addresses_of_hosts(rollout_host, placement)
    return placement


def placement_of_trainer(
    config: TrainConfig, contract: NumericsContract, hosts: Sequence[Host]
) -> Placement:
    """Return the placement of ranks without servers; raises as `placement_of` does."""
    if config.cluster.actor_num_gpus_per_node:
        _require_device(contract, hosts)
    placement = place_trainer(config.cluster, contract.device, hosts)
    _require_device(contract, placement.hosts)
    return placement


def _require_gpus_if_counted(
    count: EngineCountConfig, contract: NumericsContract, hosts: Sequence[Host]
) -> None:
    if contract.device == "cpu" and (count.rollout_num_gpus or count.rollout_num_gpus_per_engine):
        _require_device(contract, hosts)
        raise ConfigError(
            "--rollout-num-gpus, --rollout-num-gpus-per-engine: there are no GPUs here. Give "
            "--rollout-num-engines, the servers that share the hosts' cores, and --sglang-tp-size."
        )


def _require_device(contract: NumericsContract, hosts: Sequence[Host]) -> None:
    """Raise ContractError if the contract is for CPUs and another one of the hosts in use has GPUs.

    The contract is made from this host, and the processes would leave those GPUs unused.
    """
    with_gpus = (host for host in hosts if host.num_gpus and not host.is_here)
    if contract.device == "cpu" and (host := next(with_gpus, None)) is not None:
        raise ContractError(
            f"{host}: its node of the cluster has num_gpus={host.num_gpus}, and this host, from which "
            "the contract is made, shows no GPU to PyTorch. Start the command on a host with GPUs, or, "
            "to compute on cores, join that node again with `ray start --num-gpus 0`."
        )


def placement_here(config: TrainConfig, contract: NumericsContract) -> Placement:
    """Return the placement on this host alone."""
    return placement_of(config, contract, hosts_here())


def hosts_here() -> list[Host]:
    """Return this host with its GPUs, as a placement takes hosts."""
    return [this_host(num_gpus())]


def require_reach(config: TrainConfig, placement: Placement) -> None:
    """Raise ConfigError if --weight-sync cannot reach an engine, or if hosts share one address."""
    if placement.is_here:
        return
    _require_addresses_of_hosts(config.engine.rollout_host, placement)
    if config.sync.weight_sync == "ipc":
        _require_gpu_memory_in_reach(config.plan.may_lag, placement)


def _require_gpu_memory_in_reach(may_lag: bool, placement: Placement) -> None:
    """Raise ConfigError if an engine's host has no rank that can send it weights over CUDA IPC.

    Every rank sends in a push. In a run that may lag, a restarted server gets its weights from rank 0
    alone, which keeps them.
    """
    senders = [slot.host for slot in placement.trainer[: 1 if may_lag else None]]
    far = (i for i, slot in enumerate(placement.engines) if slot.host not in senders)
    if (engine := next(far, None)) is not None:
        ranks = "rank 0 of the trainer, which keeps the weights," if may_lag else "a rank"
        raise ConfigError(
            f"--weight-sync=ipc: a GPU's memory can be opened on its own host, and engine {engine} is "
            f"on {placement.engines[engine].host}, without {ranks} beside it. Choose --weight-sync "
            "tensor."
        )


def _require_addresses_of_hosts(rollout_host: str, placement: Placement) -> None:
    if rollout_host != ServerConfig().rollout_host and not placement.is_here:
        raise ConfigError(
            f"--rollout-host={rollout_host}: other hosts than this one are taken, and each server "
            "listens on its own host's address in the cluster. Leave the flag out."
        )


def share_of_cores(processes: int) -> int:
    """Return the number of threads for each of some processes on this host."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
