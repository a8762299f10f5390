"""Where every process of a run is: a slot for each rank of the trainer and for each engine.

Ranks take the first GPUs of the first hosts, engines those after them, or, with --colocate, the first
ones too; an engine's GPUs are neighbours on one host. Without GPUs a slot is a share of a host's cores:
an engine goes where the fewest processes are. Trainer and engines compute in turns, so each side shares
out all cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from onpolicy.cluster.hosts import Host
from onpolicy.config.groups import ClusterConfig, ServersConfig
from onpolicy.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one process, or for one server with its processes."""

    host: Host

    devices: tuple[int, ...]
    """Numbers of its GPUs among those that the host's node sees; none on a CPU."""

    cpu_threads: int
    """Its share of the host's cores, for each of its processes; at least 1."""


@dataclass(frozen=True, slots=True)
class Placement:
    """All slots of a run, by rank and by the engine's number."""

    trainer: tuple[Slot, ...]
    engines: tuple[Slot, ...]

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts that the run takes, that of the trainer's rank 0 first."""
        return tuple(dict.fromkeys(slot.host for slot in (*self.trainer, *self.engines)))

    @property
    def is_here(self) -> bool:
        """Whether all of it is on the controller's own host."""
        return all(host.is_here for host in self.hosts)

    def describe(self) -> list[str]:
        """What is on each host, in a line for each."""
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


def place(
    cluster: ClusterConfig,
    servers: ServersConfig,
    gpus_per_engine: int,
    device: str,
    hosts: Sequence[Host],
) -> Placement:
    """Slots on `hosts`, which are taken in their order.

    device: `cuda` or `cpu`. gpus_per_engine: tensor-parallel ranks of an engine; on a CPU they are
    processes too. No engine is placed with --rollout-server-url. Raises ConfigError with the sum that
    does not fit.
    """
    num_engines = 0 if servers.rollout_server_url else servers.rollout_num_engines
    if device == "cuda":
        return _on_gpus(cluster, servers.colocate, num_engines, gpus_per_engine, hosts)
    return _on_cores(cluster, num_engines, gpus_per_engine, hosts)


def _on_gpus(
    cluster: ClusterConfig, colocate: bool, num_engines: int, per_engine: int, hosts: Sequence[Host]
) -> Placement:
    if cluster.actor_num_ranks_per_node:
        raise ConfigError(
            f"--actor-num-ranks-per-node={cluster.actor_num_ranks_per_node}: with GPUs each rank of the "
            "trainer takes one. Give --actor-num-gpus-per-node."
        )
    ranks = cluster.ranks_per_node
    of_trainer = _enough(cluster, hosts, lambda host: host.num_gpus >= ranks)
    trainer = tuple(_gpu_slot(host, (gpu,), ranks) for host in of_trainer for gpu in range(ranks))
    engines: list[Slot] = []
    for host in hosts:
        taken = ranks if host in of_trainer and not colocate else 0
        here = range(taken, host.num_gpus - per_engine + 1, per_engine)
        for first in list(here)[: num_engines - len(engines)]:
            engines.append(_gpu_slot(host, tuple(range(first, first + per_engine)), len(here)))
    if len(engines) < num_engines:
        raise ConfigError(_gpu_sum(cluster, colocate, num_engines, per_engine, hosts))
    return Placement(trainer, tuple(engines))


def _gpu_slot(host: Host, devices: tuple[int, ...], num_on_host: int) -> Slot:
    return Slot(host, devices, _share(host, num_on_host * len(devices)))


def _gpu_sum(
    cluster: ClusterConfig, colocate: bool, num_engines: int, per_engine: int, hosts: Sequence[Host]
) -> str:
    ranks, theirs = cluster.num_ranks, num_engines * per_engine
    plus = "and, on the same GPUs," if colocate else "+"
    total = max(ranks, theirs) if colocate else ranks + theirs
    share = "" if colocate else ", or let them share GPUs (--colocate)"
    return (
        f"--rollout-num-engines={num_engines}: {ranks} trainer ranks {plus} {num_engines} servers x "
        f"--sglang-tp-size {per_engine} = {total} GPUs, and there are {_listed(hosts)}; a server's GPUs "
        f"are on one host. Start fewer ranks (--actor-num-gpus-per-node) or fewer servers{share}."
    )


def _on_cores(
    cluster: ClusterConfig, num_engines: int, per_engine: int, hosts: Sequence[Host]
) -> Placement:
    if cluster.actor_num_gpus_per_node:
        raise ConfigError(
            f"--actor-num-gpus-per-node={cluster.actor_num_gpus_per_node}: there are no GPUs here. Give "
            "--actor-num-ranks-per-node, the ranks that share a host's cores."
        )
    ranks = cluster.ranks_per_node
    of_trainer = _enough(cluster, hosts, lambda host: host.num_cpus > 0)
    trainer = tuple(Slot(h, (), _share(h, ranks)) for h in of_trainer for _ in range(ranks))
    load = {host: ranks * (host in of_trainer) for host in hosts if host.num_cpus}
    of_engines: list[Host] = []
    for _ in range(num_engines):
        least = min(load, key=lambda host: load[host])  # the first of those
        load[least] += per_engine
        of_engines.append(least)
    counts = {host: of_engines.count(host) * per_engine for host in of_engines}
    return Placement(trainer, tuple(Slot(h, (), _share(h, counts[h])) for h in of_engines))


def _enough(
    cluster: ClusterConfig, hosts: Sequence[Host], suits: Callable[[Host], bool]
) -> list[Host]:
    """The first hosts that suit the trainer, as many as it takes."""
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
