"""A command's engines on the hosts of a cluster: with a trainer, or servers alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from onpolicy.cluster.hosts import Host, this_host
from onpolicy.cluster.placement import Placement, Slot
from onpolicy.cluster.places import Places
from onpolicy.cluster.session import session, when_it_fits
from onpolicy.config import TrainConfig
from onpolicy.config.groups import HostsConfig
from onpolicy.contract import NumericsContract
from onpolicy.run.engine_specs import make_rollout_group, places_in
from onpolicy.run.engines import EnginePair
from onpolicy.run.placement import placement_of
from onpolicy.train import Trainer

logger = logging.getLogger(__name__)

MakeEngines = Callable[..., EnginePair]
"""Takes what `EnginePair` takes, less what makes its trainer."""


@contextmanager
def on_cluster(config: TrainConfig, contract: NumericsContract) -> Iterator[MakeEngines]:
    """Be in the run's cluster, and know what makes its engines there.

    It places them on the hosts that there are when it is called, and says where. It raises ConfigError
    if they do not fit.
    """

    def make_engines(*args: Any, make_rollout: Any = make_rollout_group, **more: Any) -> EnginePair:
        placement = when_it_fits(partial(placement_of, config, contract), config.cluster)
        for line in placement.describe():
            logger.info("%s", line)
        make_rollout = partial(make_rollout, places=places_in(placement, config))
        make_trainer = partial(_make_ranks, placement.trainer)
        return EnginePair(*args, make_rollout=make_rollout, make_trainer=make_trainer, **more)

    with session(config.cluster):
        yield make_engines


@contextmanager
def places_on_cluster(
    cluster: HostsConfig, place: Callable[[Sequence[Host]], Placement], cpu_threads: int = 0
) -> Iterator[Places]:
    """Where servers without a trainer are: on this host, or with --ray-address on those of that cluster,
    which this process is in meanwhile. Raises ConfigError if they do not fit."""
    with ExitStack() as stack:
        if cluster.ray_address:
            stack.enter_context(session(cluster))
            placement = when_it_fits(place, cluster)
        else:
            placement = place([this_host(torch.cuda.device_count())])
        for line in placement.describe():
            logger.info("%s", line)
        yield Places(placement, cpu_threads=cpu_threads)


def _make_ranks(
    slots: tuple[Slot, ...], config: TrainConfig, contract: NumericsContract, logs: Path
) -> Trainer:
    from onpolicy.cluster.trainer_ranks import TrainerRanks  # imports Ray, which a session prepares

    return TrainerRanks(config, contract, logs, slots)
