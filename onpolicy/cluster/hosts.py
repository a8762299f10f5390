"""A host of a run's cluster, as placement sees it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from onpolicy.system.network import LOOPBACK


@dataclass(frozen=True, slots=True)
class Host:
    """The resources of one node of the cluster."""

    name: str
    """The node's id in Ray, by which actors are placed."""

    label: str
    """The name that people use."""

    address: str
    """The IP address among the hosts."""

    num_cpus: int
    num_gpus: int

    is_here: bool = True
    """Whether it is the controller's own host."""

    def __str__(self) -> str:
        return f"{self.label} ({self.address})"


def this_host(num_gpus: int) -> Host:
    """Return this host as the only one of a cluster that has not been started yet."""
    return Host("", socket.gethostname(), LOOPBACK[0], len(os.sched_getaffinity(0)), num_gpus)
