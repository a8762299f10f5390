"""The rule by which rollouts are drawn, without engines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.run.schedule import Schedule

schedules = st.builds(
    lambda lag, first, more: Schedule(lag=lag, first=first, last=first + more),
    st.integers(0, 5), st.integers(0, 4), st.integers(1, 12),
)  # fmt: skip


@given(schedules)
def test_every_step_is_drawn_once_and_under_the_version_that_is_said(schedule):
    drawn = [
        (step, version)
        for version in range(schedule.first, schedule.last)
        for step in schedule.drawn_under(version)
    ]
    assert drawn == [(s, schedule.version_of(s)) for s in range(schedule.first, schedule.last)]


@given(schedules)
def test_a_step_is_drawn_before_it_is_trained_on_and_lags_by_no_more_than_is_asked_for(schedule):
    for step in range(schedule.first, schedule.last):
        version = schedule.version_of(step)
        assert version == max(schedule.first, step - schedule.lag)


@pytest.mark.parametrize(
    ("lag", "drawn"),
    [
        (0, [[0], [1], [2], [3]]),
        (1, [[0, 1], [2], [3], []]),
        (2, [[0, 1, 2], [3], [], []]),
    ],
)
def test_what_is_drawn_under_each_version_of_a_run_of_four_steps(lag, drawn):
    schedule = Schedule(lag=lag, first=0, last=4)
    assert [list(schedule.drawn_under(version)) for version in range(4)] == drawn
