"""A command's engines on the hosts of a cluster: with a trainer, or servers alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from onpolicy.cluster.engine_places import Places
from onpolicy.cluster.placement import Placement, Slot
from onpolicy.cluster.session import alive_hosts, session, when_it_fits
from onpolicy.config import TrainConfig
from onpolicy.config.groups import HostsConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError, ContractError
from onpolicy.rollout.base import RolloutGroup
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.engine_specs import make_rollout_group, places_in
from onpolicy.run.launch.host_shares import (
    hosts_here,
    placement_here,
    placement_of,
    placement_of_trainer,
)
from onpolicy.run.launch.memory_checks import Needs, PlaceOn, fitting, require_room_of
from onpolicy.train import Trainer

logger = logging.getLogger(__name__)

MakeEngines = Callable[..., EnginePair]
"""A factory with the arguments of `EnginePair`, less its own `make_trainer`."""


class OnCluster:
    """A factory of a run's engines on the hosts of its cluster, which this process has joined."""

    def __init__(self, config: TrainConfig, contract: NumericsContract):
        self.config, self.contract = config, contract
        self._places: Places | None = None
        self._needs: Needs | None = None

    def make_engines(
        self,
        own: TrainConfig,
        hf_config: PretrainedConfig,
        own_contract: NumericsContract,
        directory: Path,
        longest_sequence: int,
        make_rollout: Callable[..., RolloutGroup] = make_rollout_group,
    ) -> EnginePair:
        """Place engines and ranks on the present hosts, log their places, and return them.

        Raises ConfigError if they do not fit the hosts, or the memory of one of them. A second call,
        after a loss, raises EngineError instead, and does not wait for other hosts to join.
        """
        config, is_again = self.config, self._places is not None
        if config.cluster.ray_address:
            self._needs = Needs.of(own, hf_config, own_contract, longest_sequence)
        place = partial(fitting, partial(placement_of, config, self.contract), self._needs)
        placement = _said(*when_it_fits(place, config.cluster, after_a_loss=is_again))
        self._places = places_in(placement, config, require_room_of(self._needs))
        return EnginePair(
            own,
            hf_config,
            own_contract,
            directory,
            longest_sequence=longest_sequence,
            make_rollout=partial(make_rollout, places=self._places),
            make_trainer=partial(_make_ranks, placement.trainer),
        )


@contextmanager
def on_cluster(config: TrainConfig, contract: NumericsContract) -> Iterator[OnCluster]:
    """Join the run's cluster, and yield the factory of its engines."""
    with session(config.cluster, config.engine.rollout_start_timeout):
        yield OnCluster(config, contract)


@contextmanager
def trainer_on_cluster(
    config: TrainConfig, contract: NumericsContract, needs: Needs, logs: Path
) -> Iterator[Trainer]:
    """Yield a trainer without servers on the hosts of the run's cluster.

    `logs`: the directory for the logs of its ranks. Raises ConfigError if it does not fit the hosts, or
    the memory of one of them.
    """
    asked = needs if config.cluster.ray_address else None
    place = partial(fitting, partial(placement_of_trainer, config, contract), asked)
    start_seconds = config.engine.rollout_start_timeout
    with session(config.cluster, start_seconds), ExitStack() as stack:
        placement = _said(*when_it_fits(place, config.cluster))
        trainer = _make_ranks(placement.trainer, config, contract, logs)
        stack.callback(trainer.close)
        yield trainer


@contextmanager
def places_on_cluster(
    cluster: HostsConfig, place: PlaceOn, cpu_threads: int = 0, needs: Needs | None = None
) -> Iterator[Places]:
    """Yield the places of servers without a trainer: on this host, or on the cluster at --ray-address,
    which this process joins meanwhile.

    Raises ConfigError if they do not fit, or, if their needs are given, if a host has too little memory.
    """
    with ExitStack() as stack:
        if cluster.ray_address:
            stack.enter_context(session(cluster))
            placement = _said(*when_it_fits(partial(fitting, place, needs), cluster))
        else:
            placement = _said(*fitting(place, None, hosts_here()))
        yield Places(
            placement,
            cpu_threads=cpu_threads,
            hosts=alive_hosts if cluster.ray_address else hosts_here,
            require_room=require_room_of(needs),
        )


def planned(
    config: TrainConfig,
    hf_config: PretrainedConfig,
    contract: NumericsContract,
    longest_sequence: int,
) -> list[str]:
    """Return the places that a run would use at present, in a line for each host.

    If the run would be refused, return the reason instead: a dry run only reports it, since the run may
    be made elsewhere.
    """
    try:
        if not config.cluster.ray_address:
            return placement_here(config, contract).describe()
        needs = Needs.of(config, hf_config, contract, longest_sequence)
        with session(config.cluster) as hosts:
            return fitting(partial(placement_of, config, contract), needs, hosts)[1]
    except (ConfigError, ContractError) as error:
        return [f"here and now the run would be refused: {error}"]


def _said(placement: Placement, lines: Sequence[str]) -> Placement:
    for line in lines:
        logger.info("%s", line)
    return placement


def _make_ranks(
    slots: tuple[Slot, ...], config: TrainConfig, contract: NumericsContract, logs: Path
) -> Trainer:
    from onpolicy.cluster.trainer_ranks import TrainerRanks  # imports Ray, which a session prepares

    return TrainerRanks(config, contract, logs, slots)
