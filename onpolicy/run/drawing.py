"""What draws a run's rollouts: a rule, the clock, or what the clock decided in an earlier run."""

from __future__ import annotations

from onpolicy.rollout.free_groups import FreeGroups
from onpolicy.run.ahead import Drawing, Rollouts
from onpolicy.run.engines import EnginePair
from onpolicy.run.free import FreeRollouts
from onpolicy.run.replay import Replayed
from onpolicy.run.sampler import Sampler
from onpolicy.run.schedule import Schedule


def make_drawing(sampler: Sampler, engines: EnginePair, first: int) -> Drawing:
    """What draws the rollouts of a run that begins, or goes on, after `first` of them."""
    if sampler.inputs.replayed is not None:
        return Replayed(sampler.inputs.replayed, sampler, engines, first)
    if isinstance(sampler.open, FreeGroups):
        return FreeRollouts(sampler, sampler.open, engines)
    rollout = sampler.config.rollout
    schedule = Schedule(lag=rollout.rollout_lag, first=first, last=rollout.num_rollout)
    return Rollouts(schedule, sampler.roll_out, engines)
