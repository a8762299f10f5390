"""A command's engines on the hosts of a cluster: what `train` and `verify` have of their own in Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from onpolicy.cluster.placement import Slot
from onpolicy.cluster.session import session, when_it_fits
from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.run.engine_specs import make_rollout_group
from onpolicy.run.engines import EnginePair
from onpolicy.run.placement import placement_of
from onpolicy.train import Trainer

logger = logging.getLogger(__name__)

MakeEngines = Callable[..., EnginePair]
"""Takes what `EnginePair` takes, less what makes its two sides."""


@contextmanager
def on_cluster(config: TrainConfig, contract: NumericsContract) -> Iterator[MakeEngines]:
    """Be in the run's cluster, and know what makes its engines there.

    It places them on the hosts that there are when it is called, and says where. It raises ConfigError
    if they do not fit.
    """

    def make_engines(*args: Any, **more: Any) -> EnginePair:
        placement = when_it_fits(partial(placement_of, config, contract), config.cluster)
        for line in placement.describe():
            logger.info("%s", line)
        make_rollout = partial(make_rollout_group, placement=placement)
        make_trainer = partial(_make_ranks, placement.trainer)
        return EnginePair(*args, make_rollout=make_rollout, make_trainer=make_trainer, **more)

    with session(config.cluster):
        yield make_engines


def _make_ranks(
    slots: tuple[Slot, ...], config: TrainConfig, contract: NumericsContract, logs: Path
) -> Trainer:
    from onpolicy.cluster.trainer_ranks import TrainerRanks  # imports Ray, which a session prepares

    return TrainerRanks(config, contract, logs, slots)
