"""Engines in memory on several hosts, where a run's own placement puts them, also when a host leaves."""

from __future__ import annotations

from onpolicy.cluster import placement as hosts
from onpolicy.cluster.engine_host import Places
from onpolicy.cluster.placement import place
from onpolicy.config.groups import ClusterConfig
from onpolicy.errors import EngineError
from tests.support.engines_in_memory import Engine, Host


class PlacedEngine(Engine):
    """An engine that is started elsewhere if its host has left, as a `PlacedServer` is."""

    def __init__(self, spec, port, log_file, cluster):
        super().__init__(spec, port, log_file)
        self._cluster = cluster

    def start(self):
        if self.spec.node and self.spec.node not in {host.name for host in self._cluster.alive}:
            self.spec = self._cluster.places.elsewhere(self.spec, EngineError("nothing answers."))
            self.url = f"http://{self.spec.host}:{self.port}"
        super().start()


class Cluster(Host):
    """So many hosts, the controller's own first; the trainer's rank is there."""

    make_engine: type[PlacedEngine] = PlacedEngine

    def __init__(self, count):
        super().__init__()
        self.alive = [
            hosts.Host(f"id-{i}", f"host{i}", f"10.0.0.{i}", 8, 0, is_here=i == 0)
            for i in range(count)
        ]

    def placement(self, config):
        """That of a run which begins now."""
        return place(ClusterConfig(), config, 1, "cpu", self.alive)

    def specs(self, spec, config):
        self.places = Places(self.placement(config), hosts=lambda: self.alive)
        return self.places.specs(spec)

    def new_engine(self, spec, port, log_file):
        return self.make_engine(spec, port, log_file, self)

    def lose_last_host(self):
        """It leaves with its engines; returns how many of them ran."""
        lost = self.alive.pop()
        gone = [e for e in self.engines if e.spec.node == lost.name and e.memory is not None]
        for engine in gone:
            engine.memory = None
        return len(gone)
