"""Rewards that are advantages, so that a run can set the advantage of unsolvable prompts.

    --advantage-estimator reinforce --rm-type= --group-rm --rewards exact=0 \
        examples/collapse/advantages.py:compared examples/collapse/advantages.py:unsolvable=-0.5

reinforce takes rewards as they are. So a solvable prompt's responses are compared with each other,
those of a prompt that is never solved all have the advantage -0.5, and `exact` is logged alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from onpolicy.types import Sample


def compared(samples: Sequence[Sample]) -> list[float]:
    """1 for a right response and 0 for another, less the mean of the prompt's."""
    right = [float(sample.response.strip() == sample.prompt.label) for sample in samples]
    return [each - fmean(right) for each in right]


def unsolvable(samples: Sequence[Sample]) -> list[float]:
    """1 for a response to a prompt whose label no answer reaches, since it is no number; else 0."""
    return [float(not sample.prompt.label.isdigit()) for sample in samples]
