"""Engines in memory on several hosts, where a run's own placement puts them, also when a host leaves."""

from __future__ import annotations

from pathlib import Path

from onpolicy.cluster import hosts
from onpolicy.cluster.engine_places import Places
from onpolicy.cluster.placement import Placement, place
from onpolicy.config.groups import ClusterConfig, EngineConfig
from onpolicy.errors import EngineError
from onpolicy.rollout.engine_args import EngineSpec
from tests.support.engines_in_memory import Engine, Host


class PlacedEngine(Engine):
    """An engine that is started elsewhere if its host has left, as a `PlacedServer` is."""

    def __init__(self, spec: EngineSpec, port: int, log_file: Path, cluster: Cluster):
        super().__init__(spec, port, log_file)
        self._cluster = cluster

    def start(self) -> None:
        if self.spec.node and self.spec.node not in {host.name for host in self._cluster.alive}:
            self.spec = self._cluster.places.elsewhere(self.spec, EngineError("nothing answers."))
            self.url = f"http://{self.spec.host}:{self.port}"
        super().start()


class Cluster(Host):
    """So many hosts, the controller's own first; the trainer's rank is there."""

    make_engine: type[PlacedEngine] = PlacedEngine

    def __init__(self, count: int):
        super().__init__()
        self.alive = [
            hosts.Host(f"id-{i}", f"host{i}", f"10.0.0.{i}", 8, 0, is_here=i == 0)
            for i in range(count)
        ]

    def placement(self, config: EngineConfig) -> Placement:
        """That of a run which begins now."""
        return place(ClusterConfig(), config, 1, "cpu", self.alive)

    def specs(self, spec: EngineSpec, config: EngineConfig) -> list[EngineSpec]:
        self.places = Places(self.placement(config), hosts=lambda: self.alive)
        return self.places.specs(spec)

    def new_engine(self, spec: EngineSpec, port: int, log_file: Path) -> Engine:
        return self.make_engine(spec, port, log_file, self)

    def lose_last_host(self) -> int:
        """It leaves with its engines; returns how many of them ran."""
        lost = self.alive.pop()
        gone = [e for e in self.engines if e.spec.node == lost.name and e.memory is not None]
        for engine in gone:
            engine.memory = None
        return len(gone)
