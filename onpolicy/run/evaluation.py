"""An evaluation of a run, logged even if it fails."""

from __future__ import annotations

from onpolicy.run.journal import Journal
from onpolicy.run.sampler import Sampler


def evaluate(sampler: Sampler, journal: Journal, name: str, step: int) -> dict[str, float]:
    """Sample and score an evaluation set after `step` rollouts; return its metrics."""
    with journal.failing(step, sampler.failed_so_far, name):
        groups, metrics, failed = sampler.evaluate(name)
    journal.on_evaluation(step, name, groups, metrics, failed)
    return metrics
