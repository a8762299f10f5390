"""A microscope for engines whose server is recorded, for tests to look through."""

from contextlib import contextmanager
from functools import partial

from onpolicy.explain.explain_inputs import TAPS
from onpolicy.explain.microscope import Microscope
from onpolicy.run.launch.engine_specs import make_rollout_group
from tests.support.engines_fixture import make_engines, make_requests, running

TEMPERATURE = 0.7


@contextmanager
def running_microscope(checkpoint, directory, **engine):
    """One for a pair of `make_engines`, which runs meanwhile and holds the checkpoint's weights."""
    taps = directory / "taps"
    taps.mkdir()
    recorded = partial(make_rollout_group, extensions={TAPS: str(taps)})
    with running(make_engines(checkpoint, directory, make_rollout=recorded, **engine)) as pair:
        requests = make_requests(6, seed=6, max_new_tokens=12, temperature=TEMPERATURE)
        yield Microscope(pair, taps, requests, TEMPERATURE)
