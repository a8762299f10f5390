"""A host of a run's cluster, as placement sees it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from onpolicy.system.network import LOOPBACK


@dataclass(frozen=True, slots=True)
class Host:
    """What one node of the cluster has."""

    name: str
    """The node's id in Ray, by which actors are put there."""

    label: str
    """What people call it."""

    address: str
    """Its IP address among the hosts."""

    num_cpus: int
    num_gpus: int

    is_here: bool = True
    """Whether it is the controller's own."""

    def __str__(self) -> str:
        return f"{self.label} ({self.address})"


def this_host(num_gpus: int) -> Host:
    """This host alone, as a cluster of our own would have it; such a cluster has not been started."""
    return Host("", socket.gethostname(), LOOPBACK[0], len(os.sched_getaffinity(0)), num_gpus)
