"""A scorer whose classifier is served by servers of its own, which start again if they die."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from onpolicy.cluster.engine_host import make_server
from onpolicy.cluster.engine_places import Places
from onpolicy.cluster.placement import Placement
from onpolicy.config import TrainConfig
from onpolicy.rewards import Answers, Failure, Numbers
from onpolicy.rewards.scorer import Groups, Scorer
from onpolicy.rollout.sglang import SglangGroup
from onpolicy.run.launch.classifiers import (
    classifier_placement,
    classifier_spec,
    has_own_classifier,
)
from onpolicy.run.launch.host_shares import placement_here


def make_scorer(config: TrainConfig, beside: Placement | None = None) -> Scorer:
    """The scorer of a run, whose servers of a classifier, if it has some of its own, have been started.

    beside: where the run's other processes are, if not where `onpolicy train` has them on this host.
    """
    if not has_own_classifier(config):
        return Scorer(config.reward)
    spec = classifier_spec(config)
    placement = classifier_placement(config, beside or placement_here(config, spec.contract))
    places = Places(placement, cpu_threads=config.engine.cpu_threads)
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
                again = super(ServingScorer, self)._ask(source, [[samples[i] for i in failed]])()
                for i, each in zip(failed, again, strict=True):
                    found[i] = each
            return found

        return answers

    def close(self) -> None:
        super().close()
        self.servers.stop()
