import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallback_correction.advantages import group_advantages

ESTIMATORS = [
    "grpo", "dr_grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
]  # fmt: skip
CENTRED = ["grpo", "dr_grpo", "rloo"]

EPSILON = 1e-6
GRPO_OF_2, GRPO_OF_3 = 1 / (2**0.5 + EPSILON), 2 / (2 + EPSILON)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [[GRPO_OF_2, -GRPO_OF_2], [GRPO_OF_3, 0.0, -GRPO_OF_3]]),
        ("dr_grpo", [[1.0, -1.0], [2.0, 0.0, -2.0]]),
        ("rloo", [[2.0, -2.0], [3.0, 0.0, -3.0]]),
        ("reinforce", [[2.0, 0.0], [5.0, 3.0, 1.0]]),
    ],
)
def test_advantages_exactly(estimator, expected):
    assert group_advantages([[2.0, 0.0], [5.0, 3.0, 1.0]], estimator) == [
        pytest.approx(group, rel=1e-14) for group in expected
    ]


def test_reinforce_plus_plus_whitens_over_the_batch():
    # Mean 3, squared deviations 1, 9, 1, 9 over n - 1 = 3.
    std = (20 / 3) ** 0.5 + EPSILON
    expected = [[-1 / std, 3 / std], [1 / std, -3 / std]]
    assert group_advantages([[2.0, 6.0], [4.0, 0.0]], "reinforce_plus_plus") == [
        pytest.approx(group, rel=1e-14) for group in expected
    ]


def test_reinforce_plus_plus_baseline_centres_each_group_and_scales_them_together():
    # Centred: -2, 2, 2, -2, over n - 1 = 3.
    scale = 2 / ((16 / 3) ** 0.5 + EPSILON)
    found = group_advantages([[2.0, 6.0], [4.0, 0.0]], "reinforce_plus_plus_baseline")
    assert found == [pytest.approx([-scale, scale]), pytest.approx([scale, -scale])]


@pytest.mark.parametrize("estimator", CENTRED)
@given(st.floats(-1e6, 1e6), st.integers(1, 20))
def test_equal_rewards_give_exactly_zero(estimator, reward, n):
    # The mean of three 0.1 is not 0.1 in floating point.
    assert group_advantages([[reward] * n, [0.1] * 3], estimator) == [[0.0] * n, [0.0] * 3]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_sample_and_no_sample_come_through(estimator):
    assert group_advantages([], estimator) == []
    assert group_advantages([[]], estimator) == [[]]
    expected = 2.0 if estimator == "reinforce" else 0.0
    assert group_advantages([[2.0]], estimator) == [[expected]]


rewards = st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=8)


@pytest.mark.parametrize("estimator", CENTRED)
@given(rewards, rewards)
def test_a_group_sums_to_zero_and_does_not_see_the_others(estimator, group, other):
    both = group_advantages([group, other], estimator)
    assert both == group_advantages([group], estimator) + group_advantages([other], estimator)
    assert [sum(advantages) for advantages in both] == pytest.approx([0, 0], abs=1e-9)


@given(st.lists(rewards, min_size=1, max_size=4))
def test_reinforce_plus_plus_has_mean_0(groups):
    advantages = group_advantages(groups, "reinforce_plus_plus")
    assert sum(map(sum, advantages)) == pytest.approx(0, abs=1e-6)
