"""A host of a run's cluster, as placement sees it."""

from __future__ import annotations

from dataclasses import dataclass


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
