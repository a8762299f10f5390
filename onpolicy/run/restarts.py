"""The restart of a run from its last checkpoint after a lost trainer rank or host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from onpolicy.config import TrainConfig
from onpolicy.errors import HostLostError, TrainerLostError
from onpolicy.outputs.totals import RunSummary
from onpolicy.run.launch.inputs import Inputs
from onpolicy.run.loop import train
from onpolicy.run.run import Run
from onpolicy.run.saving.checkpoint import checkpoints

logger = logging.getLogger(__name__)


def train_through_losses(
    config: TrainConfig, inputs: Inputs, make_run: Callable[[TrainConfig, Inputs], Run] = Run
) -> RunSummary:
    """Call `train`, and again after each loss, up to --max-rank-restarts times.

    All engines and ranks are restarted, wherever they fit the cluster at that time. The run hash equals
    an undisturbed run's.
    """
    left = config.output.max_rank_restarts
    while True:
        try:
            return train(config, replace(inputs, ladder=deepcopy(inputs.ladder)), make_run)
        except (KeyboardInterrupt, SystemExit):
            _say_where_it_goes_on(config.output.save)
            raise
        except (TrainerLostError, HostLostError) as error:
            if not left:
                raise
            left -= 1
            logger.warning("%s", error)
        config = _resumed(config)
        begins = f"from the last checkpoint in {load}" if (load := config.output.load) else "again"
        logger.warning("the run begins %s; --max-rank-restarts leaves %d", begins, left)


def _say_where_it_goes_on(save: str) -> None:
    """Log the checkpoint from which an interrupted run can be resumed, if it has written one."""
    if save and (saved := checkpoints(Path(save))):
        logger.warning("the run was ended; --load %s goes on from %s", save, saved[max(saved)].name)


def _resumed(config: TrainConfig) -> TrainConfig:
    """Return the run that resumes from its own last checkpoint, if it has written one."""
    save = config.output.save
    if not checkpoints(Path(save)):
        return config
    return replace(config, output=replace(config.output, load=save))
