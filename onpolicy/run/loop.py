"""The reinforcement-learning step, and the loop over it."""

from __future__ import annotations

import time
from collections.abc import Callable

from onpolicy.config import TrainConfig
from onpolicy.outputs.totals import RunSummary
from onpolicy.run.launch.inputs import Inputs
from onpolicy.run.run import Run


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
    run.draw_ahead(step)
    update = run.train(groups, step)
    moves = run.govern(step, update)
    waited = run.settle_drawing()
    sync = run.push_weights() | run.probe_engines()
    perf = {"perf/step_time": time.perf_counter() - started}
    run.record(step, groups, {**rollout, **update, **moves, **waited, **sync, **perf})
    run.save_if_due()
