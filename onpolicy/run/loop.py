"""The reinforcement-learning step, and what repeats it."""

from __future__ import annotations

import time
from collections.abc import Callable

from onpolicy.config import TrainConfig
from onpolicy.run.inputs import Inputs
from onpolicy.run.run import Run
from onpolicy.types import RunSummary


def train(
    config: TrainConfig, inputs: Inputs, make_run: Callable[[TrainConfig, Inputs], Run] = Run
) -> RunSummary:
    """Run the configured reinforcement learning; see `Run` for each verb."""
    with make_run(config, inputs) as run:
        run.push_weights()
        for step in range(run.first_step, config.rollout.num_rollout):
            run.evaluate_if_due(step)
            started = time.perf_counter()
            groups, rollout = run.roll_out(step)
            update = run.train(groups, step)
            moves = run.govern(step, update)
            sync = run.push_weights()
            perf = {"perf/step_time": time.perf_counter() - started}
            run.record(step, groups, {**rollout, **update, **moves, **sync, **perf})
            run.save_if_due()
        run.evaluate_if_due(config.rollout.num_rollout)
        return run.summary()
