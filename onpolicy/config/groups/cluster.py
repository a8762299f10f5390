"""The flags of the hosts that a run takes, and of the ranks on each."""

from dataclasses import dataclass
from typing import Annotated

from fallback_correction.ranges import ReadBy, at_least
from onpolicy.config.kinds import Count, Seconds
from onpolicy.config.rules import Against


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    ray_address: Annotated[
        str,
        Against(lambda run: "://" in run.ray_address,
            "is no host:port; a run is part of the cluster, and no client of it",
            "Start a node on this host (`ray start --address=HEAD:6379`), and give auto."),
    ] = ""  # fmt: skip
    """Join the Ray cluster at this address (host:port, or auto for the one on this host) instead of
    starting one on this host that ends with the run."""

    placement_timeout: Annotated[Seconds, ReadBy("--ray-address", lambda run: run.ray_address)] = (
        300.0
    )
    """Seconds to wait for hosts of the cluster that the run needs and that have not joined it yet, or
    have too little memory free."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(HostsConfig):
    actor_num_nodes: Count = 1
    """Hosts that ranks of the trainer run on."""

    actor_num_gpus_per_node: Annotated[int | None, at_least(1)] = None
    """Ranks of the trainer on each of them, one on each GPU; 1 if not given. Not on a CPU."""

    actor_num_ranks_per_node: Annotated[
        int | None, at_least(1),
        Against(lambda run: run.actor_num_gpus_per_node is not None,
            "with --actor-num-gpus-per-node={run.actor_num_gpus_per_node} a host has a rank for each of "
            "those GPUs"),
    ] = None  # fmt: skip
    """Ranks of the trainer on each of them where there are no GPUs: they share the host's cores. 1 if
    not given."""

    rank_timeout: Seconds = 900.0
    """Seconds in which no rank of the trainer uses a processor, though all are waited for, after which
    they count as hung and are ended; at least --rollout-health-timeout. A call may take as long as it
    computes. In a collective of NCCL ranks use one: NCCL's own time limit of 2 hours ends those."""

    @property
    def ranks_per_node(self) -> int:
        """Return the number of trainer ranks on each of its hosts."""
        return self.actor_num_gpus_per_node or self.actor_num_ranks_per_node or 1

    @property
    def num_ranks(self) -> int:
        """Return the number of trainer ranks."""
        return self.actor_num_nodes * self.ranks_per_node
