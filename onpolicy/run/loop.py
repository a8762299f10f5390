"""The reinforcement-learning step, the loop over it, and its restart after a lost rank or host."""

import logging
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from onpolicy.config import TrainConfig
from onpolicy.errors import HostLostError, TrainerLostError
from onpolicy.outputs.totals import RunSummary
from onpolicy.run.launch.inputs import Inputs
from onpolicy.run.run import Run
from onpolicy.run.saving.checkpoint import checkpoints

logger = logging.getLogger(__name__)


def train(
    config: TrainConfig, inputs: Inputs, make_run: Callable[[TrainConfig, Inputs], Run] = Run
) -> RunSummary:
    """Run the configured reinforcement learning; see `Run` for each step's parts."""
    with make_run(config, inputs) as run:
        begin(run)
        for step in range(run.first_step, config.rollout.num_rollout):
            take_step(run, step)
        run.evaluate_if_due(config.rollout.num_rollout)
        return run.summary()


def begin(run: Run) -> None:
    """Push the first weights to the engines."""
    run.push_weights()
    run.probe_engines()


def take_step(run: Run, step: int) -> None:
    """Take one step of reinforcement learning: a rollout, training on it, and a push."""
    run.evaluate_if_due(step)
    started = time.perf_counter()
    groups, rollout = run.roll_out(step)
    run.rollouts.draw_ahead(step)
    update = run.train(groups, step)
    moves = run.govern(step, update)
    waited = run.settle_drawing()
    sync = run.push_weights() | run.probe_engines()
    perf = {"perf/step_time": time.perf_counter() - started}
    run.record(step, groups, {**rollout, **update, **moves, **waited, **sync, **perf})
    run.save_if_due()


def train_through_losses(
    config: TrainConfig, inputs: Inputs, make_run: Callable[[TrainConfig, Inputs], Run] = Run
) -> RunSummary:
    """Call `train`, and again after each loss, up to --max-rank-restarts times. All engines and ranks
    are restarted, wherever they fit the cluster then. The run hash equals an undisturbed run's."""
    left = config.output.max_rank_restarts
    while True:
        try:
            return train(config, replace(inputs, ladder=deepcopy(inputs.ladder)), make_run)
        except (KeyboardInterrupt, SystemExit):
            if (save := config.output.save) and (saved := checkpoints(Path(save))):
                newest = saved[max(saved)].name
                logger.warning("the run was ended; --load %s goes on from %s", save, newest)
            raise
        except (TrainerLostError, HostLostError) as error:
            if not left:
                raise
            left -= 1
            logger.warning("%s", error)
        # It resumes from its own last checkpoint, if it has written one.
        if checkpoints(Path(config.output.save)):
            config = replace(config, output=replace(config.output, load=config.output.save))
        begins = f"from the last checkpoint in {load}" if (load := config.output.load) else "again"
        logger.warning("the run begins %s; --max-rank-restarts leaves %d", begins, left)
