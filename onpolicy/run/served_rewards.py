"""A scorer whose classifier is served by servers of its own, which start again if they die."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from onpolicy.cluster.engine_host import make_server
from onpolicy.cluster.engine_places import Places
from onpolicy.cluster.placement import Placement
from onpolicy.cluster.session import free_memory_on, gpus_on
from onpolicy.config import TrainConfig
from onpolicy.rewards import Answers, Failure, Numbers
from onpolicy.rewards.scorer import Groups, Scorer
from onpolicy.rollout.sglang import SglangGroup
from onpolicy.run.launch.classifiers import (
    classifier_memory,
    classifier_placement,
    classifier_spec,
    has_own_classifier,
)
from onpolicy.run.launch.host_shares import hosts_here, placement_here
from onpolicy.run.launch.memory_checks import Needs, require_gpus, require_host

logger = logging.getLogger(__name__)


def make_scorer(
    config: TrainConfig, beside: Places | None = None, needs: Needs | None = None
) -> Scorer:
    """The scorer of a run, whose servers of a classifier, if it has some of its own, have been started.

    beside: where the run's other processes are, if not where `onpolicy train` has them on this host.
    needs: what those hold, if the hosts are to be asked for memory. Raises ConfigError if servers do not
    fit there.
    """
    if not has_own_classifier(config):
        return Scorer(config.reward)
    spec = classifier_spec(config)
    beside = beside or Places(placement_here(config, spec.contract), hosts=hosts_here)
    placement = classifier_placement(config, beside.placement, beside.hosts())
    _require_room(config, placement, beside.placement, needs)
    for line in placement.describe("reward engine"):
        logger.info("%s", line)
    places = Places(placement, cpu_threads=config.engine.cpu_threads, hosts=beside.hosts)
    places.beside, beside.beside = [beside], [places]
    engine = replace(config.engine, rollout_server_url=(), rollout_base_port=0, colocate=False)
    servers = SglangGroup(
        engine,
        places.specs(spec),
        Path(config.output.run_dir) / "logs",
        make_server=partial(make_server, elsewhere=places.elsewhere),
        name="reward",
    )
    servers.launch()
    return ServingScorer(config, servers, spec.api_key)


class ServingScorer(Scorer):
    """Asks servers of its own, and asks them again when they have died on the way."""

    def __init__(self, config: TrainConfig, servers: SglangGroup, api_key: str):
        urls = tuple(server.url for server in servers.servers)
        super().__init__(replace(config.reward, reward_server_url=urls, reward_api_key=api_key))
        self.servers = servers

    def connect(self) -> None:
        self.servers.connect({})

    def _ask(self, source: str, groups: Groups) -> Answers:
        wait = super()._ask(source, groups)
        if source != "model":
            return wait
        samples = [sample for group in groups for sample in group]

        def answers() -> list[Numbers | Failure]:
            found = wait()
            while failed := [i for i, each in enumerate(found) if isinstance(each, Failure)]:
                if not self.servers.revive():  # else they failed because a server died
                    break
                self._move()
                again = super(ServingScorer, self)._ask(source, [[samples[i] for i in failed]])()
                for i, each in zip(failed, again, strict=True):
                    found[i] = each
            return found

        return answers

    def _move(self) -> None:
        """Ask servers where they are now, which is another host if theirs has left the cluster."""
        urls = tuple(server.url for server in self.servers.servers)
        if urls != self.config.reward_server_url:
            self.config = replace(self.config, reward_server_url=urls)
            self._remotes.pop("model", None)

    def close(self) -> None:
        super().close()
        self.servers.stop()


def _require_room(
    config: TrainConfig, placement: Placement, beside: Placement, needs: Needs | None
) -> None:
    """Raise ConfigError if a host, or a GPU, has too little memory for the servers of a classifier with
    what the run has `beside` there. needs: None if it is not asked for."""
    if needs is None:
        return
    own = Needs(lambda _, servers: classifier_memory(config, servers))
    if placement.device == "cuda":
        require_gpus(placement, own, gpus_on(placement.hosts))
    free = free_memory_on(placement.hosts)
    for host in placement.hosts:
        together = needs.held(*beside.counts(host)) + own.held(*placement.counts(host))
        require_host(together, str(host), free[host], placement.device)
