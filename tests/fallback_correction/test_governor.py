"""The ladder between stock and aligned: when it moves, and that it does not swing."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallback_correction.governor import RUNGS, Governor, GovernorConfig

CONFIG = GovernorConfig(k3=1.0, ess=0.5, log_ppl_abs_diff=1.0, rise_after=2, fall_after=3)
BAD, FAIR, CALM = (2.0, 1.0, 0.0), (0.7, 1.0, 0.0), (0.0, 1.0, 0.0)


def rungs(governor, readings):
    seen = []
    for reading in readings:
        governor.update(*reading)
        seen.append(governor.rung)
    return seen


def test_it_climbs_one_rung_after_enough_bad_rollouts_in_a_row_up_to_the_last():
    seen = rungs(Governor(CONFIG), [BAD] * 12)
    assert seen[1::2] == ["tis", "mis", "decay", "aligned", "aligned", "aligned"]


@pytest.mark.parametrize("between", [FAIR, CALM])
def test_a_rollout_within_the_limits_starts_the_count_again(between):
    assert set(rungs(Governor(CONFIG), [BAD, between] * 10)) == {"stock"}


def test_it_climbs_down_after_enough_calm_rollouts_and_not_for_fair_ones():
    assert set(rungs(Governor(CONFIG, "mis"), [FAIR] * 50)) == {"mis"}
    assert rungs(Governor(CONFIG, "mis"), [CALM] * 3)[-1] == "tis"


def test_every_fall_doubles_the_calm_that_the_next_one_needs():
    governor = Governor(CONFIG, "aligned")
    lengths = []
    for _ in range(4):
        calm = 0
        while governor.rung == "aligned":
            governor.update(*CALM)
            calm += 1
        lengths.append(calm)
        rungs(governor, [BAD] * 2)
    assert lengths == [3, 6, 12, 24]


@pytest.mark.parametrize(
    ("reading", "named"),
    [
        ((1.1, 1.0, 0.0), "k3=1.1, limit 1"), ((0.0, 0.4, 0.0), "ess=0.4000, limit 0.5"),
        ((0.0, 1.0, 1.1), "log_ppl_abs_diff=1.1, limit 1"), ((math.nan, 1.0, 0.0), "k3=nan"),
        ((0.0, math.nan, 0.0), "ess=nan"),
    ],
)  # fmt: skip
def test_each_limit_counts_and_the_move_names_the_one_that_was_broken(reading, named):
    governor = Governor(CONFIG)
    assert governor.update(*reading) is None
    move = governor.update(*reading)
    assert (move.before, move.after) == ("stock", "tis")
    assert named in move.reason
    assert "2 rollouts in a row" in move.reason


@pytest.mark.parametrize("at_the_limit", [(1.0, 1.0, 0.0), (0.0, 0.5, 0.0), (0.0, 1.0, 1.0)])
def test_a_reading_at_its_limit_is_within_it(at_the_limit):
    assert set(rungs(Governor(CONFIG), [at_the_limit] * 10)) == {"stock"}


def test_it_stays_below_its_highest_rung():
    config = GovernorConfig(k3=1.0, rise_after=1, highest="mis")
    assert set(rungs(Governor(config), [BAD] * 9)[1:]) == {"mis"}


@given(st.lists(st.sampled_from([BAD, FAIR, CALM]), max_size=60), st.integers(0, 60))
def test_resumed_it_goes_on_as_if_nothing_had_happened(readings, cut):
    whole = rungs(Governor(CONFIG), readings)
    first, second = Governor(CONFIG), Governor(CONFIG)
    seen = rungs(first, readings[:cut])
    second.load_state_dict(first.state_dict())
    assert seen + rungs(second, readings[cut:]) == whole


@given(st.lists(st.sampled_from([BAD, FAIR, CALM]), max_size=60))
def test_it_moves_one_rung_at_a_time(readings):
    heights = [0, *(RUNGS.index(rung) for rung in rungs(Governor(CONFIG), readings))]
    assert all(abs(b - a) <= 1 for a, b in pairwise(heights))


@pytest.mark.parametrize(
    "wrong", [{"k3": 0}, {"ess": 1.0}, {"calm": 0}, {"rise_after": 0}, {"log_ppl_abs_diff": -1}]
)
def test_limits_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        GovernorConfig(**wrong)
