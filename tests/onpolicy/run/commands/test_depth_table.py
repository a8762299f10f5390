"""Differences of log-probabilities by the number of tokens before a token."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.run.commands.depth_table import by_depth, depths_of, table
from onpolicy.trajectory import Trajectory
from tests.support.samples import make_completion

EDGES = [(0, 63), (64, 127), (128, 255), (256, 511), (512, 1023)]


def numbers_of(depths, differences):
    train = torch.full((len(depths),), -2.0)
    rollout = train - torch.tensor(differences)
    return by_depth(torch.tensor(depths), train, rollout)


@given(st.lists(st.integers(0, 1023), min_size=1, max_size=40))
def test_every_token_is_in_the_bucket_of_its_depth(depths):
    found = numbers_of(depths, [0.0] * len(depths))
    expected = [(a, b, sum(a <= x <= b for x in depths)) for a, b in EDGES]
    assert [(x["from"], x["to"], x["num_tokens"]) for x in found] == [x for x in expected if x[2]]
    assert all(x["k3_kl_mean"] == x["max_abs_diff"] == x["share_beyond_1.28"] == 0 for x in found)


def test_a_bucket_has_its_own_numbers():
    near, far = numbers_of([5, 63, 64, 64, 70, 99], [0.0, 0.1, 0.2, -0.3, 0.8, -0.9])
    assert near["max_abs_diff"] == pytest.approx(0.1) and near["share_beyond_1.28"] == 0
    assert far["mean_abs_diff"] == pytest.approx((0.2 + 0.3 + 0.8 + 0.9) / 4)
    # train - rollout is the difference: exp(d) - d - 1
    k3s = [math.exp(d) - d - 1 for d in (0.2, -0.3, 0.8, -0.9)]
    assert far["k3_kl_mean"] == pytest.approx(sum(k3s) / 4)
    assert (far["share_beyond_1.28"], far["share_beyond_2"]) == (0.75, 0.5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_is_beyond_every_factor(wrong):
    (found,) = numbers_of([1, 2], [wrong, 0.0])
    assert found["share_beyond_1.28"] == found["share_beyond_2"] == 0.5


def test_a_token_is_as_deep_as_what_comes_before_it_in_all_turns():
    """Not counted from its turn, nor from its chunk of a prefill."""
    turns = Trajectory.begin([7, 8]).plus(make_completion([5, 6], [-1.0, -2.0]), 1.0).given([9])
    turns = turns.plus(make_completion([5], [-1.0]), 1.0)
    assert depths_of([turns, turns.until(3)]).tolist() == [2, 3, 5, 2]


def test_the_table_has_a_line_for_each_bucket():
    lines = table(numbers_of([5, 64, 300], [0.0, 0.5, -1.0])).splitlines()
    assert [line.split()[0] for line in lines] == ["depth", "0-63", "64-127", "256-511"]
    assert lines[2].split()[-2:] == ["100.00%", "0.00%"] and len({*map(len, lines)}) == 1
