"""The placement of a run's processes: a slot for each trainer rank and for each engine.

Ranks take the first GPUs of the first hosts; engines take the next ones, or the same with --colocate.
An engine's GPUs are neighbours on one host. Without GPUs a slot is a share of a host's cores, and an
engine goes where the fewest processes are. Ranks and engines compute in turn, each on all cores.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from onpolicy.config import TrainConfig
from onpolicy.config.groups import ClusterConfig, EngineCountConfig, ServerConfig, ServersConfig
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError, ContractError
from onpolicy.system.free_memory import num_gpus
from onpolicy.system.network import LOOPBACK


@dataclass(frozen=True, slots=True)
class Placement:
    """The slots of a run, by rank and by engine number."""

    trainer: tuple[Slot, ...]
    engines: tuple[Slot, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return *self.trainer, *self.engines

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts in use, starting with the host of the trainer's rank 0."""
        return tuple(dict.fromkeys(slot.host for slot in self.slots))

    @property
    def is_here(self) -> bool:
        """Return whether all slots are on the controller's own host."""
        return all(host.is_here for host in self.hosts)

    def gpus(self, host: Host) -> set[int]:
        """Return the numbers of the GPUs in use on a host."""
        return {gpu for slot in self.slots if slot.host == host for gpu in slot.devices}

    def shared_gpus(self, host: Host) -> set[int]:
        """Return the numbers of a host's GPUs that a rank and an engine share."""
        ranks, engines = (Placement(self.trainer, ()), Placement((), self.engines))
        return ranks.gpus(host) & engines.gpus(host)

    @property
    def device(self) -> str:
        """Return the device of its processes: `cuda` or `cpu`."""
        return "cuda" if any(slot.devices for slot in self.slots) else "cpu"

    def counts(self, host: Host) -> tuple[int, int]:
        """Return the numbers of ranks and of engines on a host."""
        sides = (self.trainer, self.engines)
        ranks, engines = (sum(slot.host == host for slot in slots) for slots in sides)
        return ranks, engines

    def describe(self) -> list[str]:
        """Return a line about each host's processes."""
        return [f"{host}: {'; '.join(self._on(host))}" for host in self.hosts]

    def _on(self, host: Host) -> Iterator[str]:
        for kind, slots in (("trainer rank", self.trainer), ("engine", self.engines)):
            for number, slot in enumerate(slots):
                if slot.host == host:
                    yield f"{kind} {number} ({_resources(slot)})"


def _resources(slot: Slot) -> str:
    if slot.devices:
        return f"GPU {', '.join(map(str, slot.devices))}"
    return f"{slot.cpu_threads} threads"


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one process, or for one server with its processes."""

    host: Host

    devices: tuple[int, ...]
    """The numbers of its GPUs among those that the host's node sees; none on a CPU."""

    cpu_threads: int
    """The share of the host's cores for each of its processes; at least 1."""


@dataclass(frozen=True, slots=True)
class Host:
    """The resources of one node of the cluster."""

    name: str
    """The node's id in Ray, by which actors are placed."""

    label: str
    """The name that people use."""

    address: str
    num_cpus: int
    num_gpus: int

    is_here: bool = True

    def __str__(self) -> str:
        return f"{self.label} ({self.address})"


NOTHING = Placement((), ())

Place = tuple[Host, tuple[int, ...]]
"""A host, and some of its GPUs."""


def place(
    cluster: ClusterConfig,
    servers: ServersConfig,
    gpus_per_engine: int,
    device: str,
    hosts: Sequence[Host],
) -> Placement:
    """Return slots on `hosts`, which are filled in their order. device: `cuda` or `cpu`.
    gpus_per_engine: tensor-parallel ranks of an engine, which are processes on a CPU, too. With
    --rollout-server-url no engine is placed. Raises ConfigError with the sum that does not fit."""
    placement = place_trainer(cluster, device, hosts)
    number, colocate = servers.num_started, servers.colocate
    return place_engines(number, gpus_per_engine, device, hosts, placement, colocate)


def place_trainer(cluster: ClusterConfig, device: str, hosts: Sequence[Host]) -> Placement:
    """Return the slots of the trainer's ranks. Raises ConfigError as `place` does."""
    ranks = cluster.ranks_per_node
    if device == "cuda":
        if cluster.actor_num_ranks_per_node:
            raise ConfigError(
                f"--actor-num-ranks-per-node={cluster.actor_num_ranks_per_node}: with GPUs each rank of "
                "the trainer takes one. Give --actor-num-gpus-per-node."
            )
        found = _enough(cluster, hosts, lambda host: host.num_gpus >= ranks)
        slots = [Slot(h, (gpu,), _share(h, ranks)) for h in found for gpu in range(ranks)]
    else:
        if cluster.actor_num_gpus_per_node:
            raise ConfigError(
                f"--actor-num-gpus-per-node={cluster.actor_num_gpus_per_node}: there are no GPUs here. "
                "Give --actor-num-ranks-per-node, the ranks that share a host's cores."
            )
        found = _enough(cluster, hosts, lambda host: host.num_cpus > 0)
        slots = [Slot(host, (), _share(host, ranks)) for host in found for _ in range(ranks)]
    return Placement(tuple(slots), ())


def place_engines(
    number: int,
    gpus_per_engine: int,
    device: str,
    hosts: Sequence[Host],
    placement: Placement = NOTHING,
    colocate: bool = False,
) -> Placement:
    """Return `placement` with `number` more engines on `hosts`. Raises ConfigError as `place` does."""
    if device == "cuda":
        places = _free_gpus(placement, gpus_per_engine, colocate, hosts)
    else:
        places = _least_used(placement, gpus_per_engine, hosts)
    found = list(islice(places, number))
    if len(found) < number:
        number += len(placement.engines)
        raise ConfigError(_sum(placement, colocate, number, gpus_per_engine, hosts))
    # New engines share a host's cores with the engines already there.
    there = Counter([slot.host for slot in placement.engines] + [host for host, _ in found])
    engines = [Slot(h, gpus, _share(h, there[h] * gpus_per_engine)) for h, gpus in found]
    return Placement(placement.trainer, (*placement.engines, *engines))


def place_again(
    placement: Placement,
    gpus_per_engine: int,
    hosts: Sequence[Host],
    colocate: bool = False,
) -> Placement:
    """Return `placement` on the remaining `hosts`: engines of lost hosts get new slots, and keep
    their numbers. Processes on remaining hosts stay where they are. Raises ConfigError if the
    engines do not fit, or if a host with ranks of the trainer is gone."""
    left = {host.name for host in hosts}
    if any(slot.host.name not in left for slot in placement.trainer):
        raise ConfigError("ranks of the trainer were there too.")
    kept = tuple(slot for slot in placement.engines if slot.host.name in left)
    number, whole = len(placement.engines) - len(kept), Placement(placement.trainer, kept)
    device = placement.device
    placed = place_engines(number, gpus_per_engine, device, hosts, whole, colocate)
    new = iter(placed.engines[len(kept) :])
    engines = (slot if slot.host.name in left else next(new) for slot in placement.engines)
    return Placement(placement.trainer, tuple(engines))


def _free_gpus(
    placement: Placement,
    per_engine: int,
    colocate: bool,
    hosts: Sequence[Host],
) -> Iterator[Place]:
    """Yield GPUs for one engine after another: free neighbours on one host."""
    ranks = () if colocate else placement.trainer
    takers = (*ranks, *placement.engines)
    taken = {(slot.host.name, gpu) for slot in takers for gpu in slot.devices}
    for host in hosts:
        free: list[int] = []
        for gpu in range(host.num_gpus):
            # A taken GPU interrupts a run of free neighbours.
            free = [] if (host.name, gpu) in taken else [*free, gpu]
            if len(free) == per_engine:
                yield host, tuple(free)
                free = []


def _least_used(placement: Placement, per_engine: int, hosts: Sequence[Host]) -> Iterator[Place]:
    """Yield hosts for one engine after another: the first of those with the fewest processes."""
    load = Counter(slot.host.name for slot in placement.trainer)
    for slot in placement.engines:
        load[slot.host.name] += per_engine
    while suitable := [host for host in hosts if host.num_cpus]:
        least = min(suitable, key=lambda host: load[host.name])
        load[least.name] += per_engine
        yield least, ()


def _sum(
    placement: Placement, colocate: bool, number: int, per_engine: int, hosts: Sequence[Host]
) -> str:
    ranks, theirs = len(placement.trainer), number * per_engine
    total = max(ranks, theirs) if colocate else ranks + theirs
    plus = "and, on the same GPUs," if colocate else "+"
    share = "" if colocate else ", or let them share GPUs (--colocate)"
    before = f"{ranks} trainer ranks {plus} " if ranks else ""
    fewer = "fewer ranks (--actor-num-gpus-per-node) or " if ranks else ""
    return (
        f"--rollout-num-engines={number}: {before}{number} servers x --sglang-tp-size {per_engine} = "
        f"{total} GPUs, and there are {_listed(hosts)}; a server's GPUs are on one host. Start "
        f"{fewer}fewer servers{share if ranks else ''}."
    )


def _enough(
    cluster: ClusterConfig, hosts: Sequence[Host], suits: Callable[[Host], bool]
) -> list[Host]:
    """Return the first suitable hosts for the trainer. Raises ConfigError if they are too few."""
    found = [host for host in hosts if suits(host)][: cluster.actor_num_nodes]
    if len(found) < cluster.actor_num_nodes:
        gpus = cluster.actor_num_gpus_per_node
        each = f" x --actor-num-gpus-per-node={gpus}" if gpus else ""
        raise ConfigError(
            f"--actor-num-nodes={cluster.actor_num_nodes}{each}: {cluster.num_ranks} trainer ranks, "
            f"{cluster.ranks_per_node} on each host, and there are {_listed(hosts)}. Ask for fewer, or "
            "let more hosts join the cluster (`ray start --address`)."
        )
    return found


def _listed(hosts: Sequence[Host]) -> str:
    each = [f"{host.num_gpus} GPUs and {host.num_cpus} cores on {host}" for host in hosts]
    return ", ".join(each) or "no hosts"


def _share(host: Host, processes: int) -> int:
    return max(1, host.num_cpus // max(processes, 1))


def placement_of(
    config: TrainConfig, contract: NumericsContract, hosts: Sequence[Host]
) -> Placement:
    """Return the placement of ranks and engines. Raises ConfigError with the sum that does not fit."""
    per_engine = tensor_parallel_size(config.sglang_args)
    if config.cluster.actor_num_gpus_per_node:
        _require_device(contract, hosts)
    placement = place(config.cluster, config.engine, per_engine, contract.device, hosts)
    _require_device(contract, placement.hosts)
    _require_addresses_of_hosts(config.engine.rollout_host, placement)
    if config.sync.weight_sync == "ipc" and not placement.is_here:
        _require_gpu_memory_in_reach(config.plan.may_lag, placement)
    return placement


def placement_of_servers(
    count: EngineCountConfig,
    per_engine: int,
    rollout_host: str,
    contract: NumericsContract,
    hosts: Sequence[Host],
) -> Placement:
    """Return the placement of servers without a trainer; raises as `placement_of` does."""
    placement = place_engines(count.rollout_num_engines, per_engine, contract.device, hosts)
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


def _require_device(contract: NumericsContract, hosts: Sequence[Host]) -> None:
    """Raise ContractError if the contract is for CPUs and another one of the hosts in use has GPUs.
    The contract is made from this host, and the processes would leave those GPUs unused."""
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
    """Return this host as the only one of a cluster that has not been started yet."""
    cores = len(os.sched_getaffinity(0))
    return [Host("", socket.gethostname(), LOOPBACK[0], cores, num_gpus())]


def _require_gpu_memory_in_reach(may_lag: bool, placement: Placement) -> None:
    """Raise ConfigError if an engine's host has no rank that can send it weights over CUDA IPC. All
    ranks push; in a run that may lag rank 0 alone keeps weights for restarted servers."""
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
