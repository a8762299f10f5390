from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.train.advantages import carries_signal, estimator, grpo, reinforce, rloo

rewards = st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=16)


def test_grpo_exactly():
    assert grpo([1.0, 0.0, 0.0, 1.0]) == pytest.approx(
        [0.866025, -0.866025, -0.866025, 0.866025], 1e-5
    )
    assert grpo([1.0, 0.0], normalize_std=False) == [0.5, -0.5]


def test_rloo_exactly():
    assert rloo([1.0, 0.0, 0.5]) == [0.75, -0.75, 0.0]


def test_reinforce_is_the_reward():
    assert reinforce([1.0, -2.0]) == [1.0, -2.0]


@pytest.mark.parametrize("function", [grpo, rloo])
@given(rewards)
def test_advantages_of_a_group_sum_to_zero_and_keep_its_order(function, rewards):
    advantages = function(rewards)
    assert sum(advantages) == pytest.approx(0, abs=1e-6)
    pairs = sorted(zip(rewards, advantages, strict=True))
    assert all(b >= a - 1e-9 for (_, a), (_, b) in pairwise(pairs))


@given(rewards, st.integers(-100, 100))
def test_a_constant_added_to_all_rewards_changes_nothing(rewards, shift):
    shifted = [r + shift for r in rewards]
    assert grpo(shifted) == pytest.approx(grpo(rewards), abs=1e-6)
    assert rloo(shifted) == pytest.approx(rloo(rewards), abs=1e-6)


def test_equal_rewards_give_zero_and_carry_no_signal():
    assert grpo([0.5] * 4) == rloo([0.5] * 4) == [0.0] * 4
    assert not carries_signal([0.5] * 4)
    assert carries_signal([0.5, 0.5, 0.6])


def test_flags_choose_the_estimator():
    assert estimator("grpo", False)([1.0, 0.0]) == [0.5, -0.5]
    assert estimator("rloo", True)([1.0, 0.0]) == [1.0, -1.0]
    assert estimator("reinforce", True)([1.0]) == [1.0]
