"""The places of a command's engines, and their new places after a host has left the cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from onpolicy.cluster.hosts import Host
from onpolicy.cluster.placement import Placement, Slot, place_again
from onpolicy.cluster.session import alive_hosts
from onpolicy.errors import ConfigError, EngineError, HostLostError
from onpolicy.rollout.engine_args import EngineSpec

logger = logging.getLogger(__name__)


RequireRoom = Callable[[Placement, Placement], None]
"""A check: raises ConfigError if the second placement adds engines to a host without room."""


class Places:
    """The slots of engines; after the loss of a host its engines get others on the remaining hosts."""

    def __init__(
        self,
        placement: Placement,
        *,
        cpu_threads: int = 0,
        colocate: bool = False,
        hosts: Callable[[], Sequence[Host]] = alive_hosts,
        require_room: RequireRoom | None = None,
    ):
        """Take a placement. cpu_threads: of each process; 0: its slot's share of the cores."""
        self.placement = placement
        self._cpu_threads, self._colocate, self.hosts = cpu_threads, colocate, hosts
        self._require_room = require_room
        self._lost: set[str] = set()

    def specs(self, spec: EngineSpec) -> list[EngineSpec]:
        """Return each engine's spec, by number.

        If everything is on this host, an engine listens for it alone, else at an address for the other
        hosts.
        """
        here = self.placement.is_here
        return [
            replace(
                self._in(slot, spec),
                number=number,
                node="" if slot.host.is_here else slot.host.name,
                host=spec.host if here else slot.host.address,
            )
            for number, slot in enumerate(self.placement.engines)
        ]

    def elsewhere(self, spec: EngineSpec, error: EngineError) -> EngineSpec:
        """Return the spec of an engine, moved from a lost host; `error` tells of the loss.

        Raises HostLostError if it fits nowhere, or if ranks of the trainer were on that host.
        """
        self._lost.add(spec.node)
        left = [host for host in self.hosts() if host.name not in self._lost]
        try:
            placement = place_again(self.placement, spec.tp_size, left, self._colocate)
            if self._require_room is not None:
                self._require_room(self.placement, placement)
        except ConfigError as reason:
            raise HostLostError(
                f"{spec.host}: the host has left the cluster, or takes no actor ({error}) Its engines "
                f"have no other place: {reason} Resume with --load, or let the run do so on the hosts "
                "that are left (--max-rank-restarts)."
            ) from error
        self.placement = placement
        slot = placement.engines[spec.number]
        return replace(self._in(slot, spec), node=slot.host.name, host=slot.host.address)

    def _in(self, slot: Slot, spec: EngineSpec) -> EngineSpec:
        return replace(
            spec,
            first_gpu=slot.devices[0] if slot.devices else 0,
            num_threads=self._cpu_threads or slot.cpu_threads,
        )
