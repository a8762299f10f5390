import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from onpolicy.algorithm.advantages import group_advantages

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


def test_reinforce_plus_plus_whitens_over_tokens():
    # verl's example: 900 tokens of reward 0 and 100 of 1. Mean 0.1, variance 90 / 999.
    scale = (90 / 999 + 1e-8) ** 0.5
    (found,) = group_advantages([[0.0, 1.0]], "reinforce_plus_plus", [[900, 100]])
    assert found == pytest.approx([-0.1 / scale, 0.9 / scale], rel=1e-14)
    assert found == pytest.approx([-0.33, 3.0], abs=5e-3)


def test_reinforce_plus_plus_baseline_centres_each_group_and_whitens_over_tokens():
    # Centred: -2, 2 | 2, -2 of 1, 3 | 2, 2 tokens. Mean 0.5, squares 6.25 + 6.75 + 4.5 + 12.5 = 30.
    scale = (30 / 7 + 1e-8) ** 0.5
    found = group_advantages(
        [[2.0, 6.0], [4.0, 0.0]], "reinforce_plus_plus_baseline", [[1, 3], [2, 2]]
    )
    expected = [[-2.5 / scale, 1.5 / scale], [1.5 / scale, -2.5 / scale]]
    assert found == [pytest.approx(group, rel=1e-14) for group in expected]


def masked_whiten(values, mask):
    """verl/utils/torch_functional.py, in its own words: [B, T]."""
    mean = (values * mask).sum() / (mask.sum() + 1e-8)
    variance = ((values - mean) ** 2 * mask).sum() / (mask.sum() + 1e-8)
    variance = variance * (mask.sum() / (mask.sum() - 1))
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask


samples = st.tuples(st.integers(-5, 5).map(float), st.integers(1, 40))


@given(st.lists(st.lists(samples, min_size=2, max_size=5), min_size=1, max_size=4))
def test_reinforce_plus_plus_is_verls_masked_whiten(groups):
    rewards, lengths = ([[s[i] for s in group] for group in groups] for i in (0, 1))
    # Of equal rewards verl's 1e-8 leaves 5e-5, where we have 0.
    assume(len({r for group in rewards for r in group}) > 1)
    found = group_advantages(rewards, "reinforce_plus_plus", lengths)
    flat = [n for group in lengths for n in group]
    mask = (torch.arange(max(flat)) < torch.tensor(flat)[:, None]).double()
    tokens = torch.tensor([r for group in rewards for r in group]).double()[:, None] * mask
    expected = masked_whiten(tokens, mask)[:, 0].tolist()
    assert [a for group in found for a in group] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.lists(st.lists(samples, min_size=1, max_size=4), min_size=1, max_size=5), st.randoms())
def test_reinforce_plus_plus_has_the_same_bits_in_any_order_of_the_groups(groups, random):
    def whitened(groups):
        rewards, lengths = ([[s[i] for s in group] for group in groups] for i in (0, 1))
        return group_advantages(rewards, "reinforce_plus_plus", lengths)

    order = random.sample(range(len(groups)), len(groups))
    found = whitened(groups)
    assert whitened([groups[i] for i in order]) == [found[i] for i in order]


@pytest.mark.parametrize("lengths", [None, [[1]], [[1, 2], [3]]])
@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_without_the_lengths_nothing_can_be_whitened(estimator, lengths):
    with pytest.raises(
        ValueError, match=r"lengths=.*whitens over tokens. Give the length of every"
    ):
        group_advantages([[0.0, 1.0]], estimator, lengths)


@pytest.mark.parametrize("estimator", CENTRED)
@given(st.floats(-1e6, 1e6), st.integers(1, 20))
def test_equal_rewards_give_exactly_zero(estimator, reward, n):
    # The mean of three 0.1 is not 0.1 in floating point.
    assert group_advantages([[reward] * n, [0.1] * 3], estimator) == [[0.0] * n, [0.0] * 3]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_sample_and_no_sample_come_through(estimator):
    assert group_advantages([], estimator, []) == []
    assert group_advantages([[]], estimator, [[]]) == [[]]
    expected = 2.0 if estimator == "reinforce" else 0.0
    assert group_advantages([[2.0]], estimator, [[1]]) == [[expected]]


rewards = st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=8)


@pytest.mark.parametrize("estimator", CENTRED)
@given(rewards, rewards)
def test_a_group_sums_to_zero_and_does_not_see_the_others(estimator, group, other):
    both = group_advantages([group, other], estimator)
    assert both == group_advantages([group], estimator) + group_advantages([other], estimator)
    assert [sum(advantages) for advantages in both] == pytest.approx([0, 0], abs=1e-9)


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@given(st.lists(samples, min_size=2, max_size=20))
def test_whitened_advantages_have_mean_0_and_variance_1_over_tokens(estimator, group):
    rewards, lengths = zip(*group, strict=True)
    (found,) = group_advantages([list(rewards)], estimator, [list(lengths)])
    total, n = sum(a * n for a, n in zip(found, lengths, strict=True)), sum(lengths)
    assert total == pytest.approx(0, abs=1e-6)
    if len(set(rewards)) > 1:
        squares = sum(a * a * n for a, n in zip(found, lengths, strict=True))
        assert squares / (n - 1) == pytest.approx(1, rel=1e-4)
    else:
        assert found == [0.0] * len(rewards)
