import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fallback_correction.tokens import alone
from onpolicy.algorithm.advantages import group_advantages, returns, whitening
from tests.support.token_batches import on_ranks

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


# Episodes of several trajectories


@pytest.mark.parametrize(
    ("estimator", "rewards", "episodes", "expected"),
    [  # slime's own values, of its test_group_relative_advantages, within 1e-6 of the std
        ("dr_grpo", [[1.0, 3.0, 3.0], [5.0, 11.0]], [[0, 1, 1], [2, 3]], [[-1, 1, 1], [-3, 3]]),
        ("dr_grpo", [[1.0, 3.0, 5.0], [7.0, 13.0]], None, [[-2, 0, 2], [-3, 3]]),
        (
            "grpo", [[0.0, 0.0, 2.0], [10.0, 14.0]], [[0, 0, 1], [2, 3]],
            [[-(0.5**0.5), -(0.5**0.5), 0.5**0.5], [-(0.5**0.5), 0.5**0.5]],
        ),
    ],
)  # fmt: skip
def test_an_episode_counts_once_and_its_trajectories_share_its_advantage_as_in_slime(
    estimator, rewards, episodes, expected
):
    found = group_advantages(rewards, estimator, episodes=episodes)
    assert found == [pytest.approx(group, rel=2e-6) for group in expected]


BRANCHED = [[2.0, 1.0, 6.0, 2.0]]
"""Of episodes with rewards of 2, 3.5 and 2: mean 2.5, variance .75."""

EPISODES = [[7, 8, 8, 9]]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [x / (0.75**0.5 + EPSILON) for x in (-0.5, -1.5, 3.5, -0.5)]),
        ("dr_grpo", [-0.5, -1.5, 3.5, -0.5]),
        ("rloo", [2 - 2.75, 1 - 2, 6 - 2, 2 - 2.75]),  # less the mean of the other episodes
        ("reinforce", [2.0, 1.0, 6.0, 2.0]),
    ],
)
def test_a_trajectory_with_a_reward_of_its_own_is_compared_with_the_episodes(estimator, expected):
    assert group_advantages(BRANCHED, estimator, episodes=EPISODES) == [
        pytest.approx(expected, rel=1e-14)
    ]


def test_every_row_a_sample_as_in_verl_is_another_advantage():
    assert group_advantages(BRANCHED, "dr_grpo") == [[-0.75, -1.75, 3.25, -0.75]]


def test_whitening_is_over_the_tokens_of_all_trajectories():
    # Values 2, 1, 6 of 1, 2 and 1 tokens: mean 2.5, squares .25 + 2 x 2.25 + 12.25 = 17.
    scale = (17 / 3 + 1e-8) ** 0.5
    found = group_advantages([[2.0, 1.0, 6.0]], "reinforce_plus_plus", [[1, 2, 1]], [[0, 1, 1]])
    assert found == [pytest.approx([-0.5 / scale, -1.5 / scale, 3.5 / scale], rel=1e-14)]


@pytest.mark.parametrize("estimator", [*CENTRED, "reinforce_plus_plus_baseline"])
def test_a_group_of_episodes_with_equal_rewards_has_no_signal(estimator):
    found = group_advantages([[0.0, 1.0, 0.5]], estimator, [[1, 1, 1]], [[0, 0, 1]])
    assert found == [[0.0] * 3]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(st.lists(st.lists(samples, min_size=1, max_size=5), max_size=4))
def test_episodes_of_one_trajectory_have_the_bits_of_samples(estimator, groups):
    rewards, lengths = ([[s[i] for s in group] for group in groups] for i in (0, 1))
    numbers = iter(range(99))
    episodes = [[next(numbers) for _ in group] for group in groups]
    found = group_advantages(rewards, estimator, lengths, episodes)
    assert found == group_advantages(rewards, estimator, lengths)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(st.lists(st.tuples(samples, st.integers(1, 4)), min_size=2, max_size=5))
def test_how_often_an_episode_branched_changes_no_advantage(estimator, group):
    """Of one whose trajectories have its reward; of its tokens each is in one trajectory."""
    rewards, lengths, episodes = [], [], []
    for number, ((reward, tokens), parts) in enumerate(group):
        cut = [tokens // parts + (i < tokens % parts) for i in range(parts)]
        rewards += [reward] * parts
        lengths += cut
        episodes += [number] * parts
    (found,) = group_advantages([rewards], estimator, [lengths], [episodes])
    (whole,) = group_advantages(
        [[reward for (reward, _), _ in group]], estimator, [[tokens for (_, tokens), _ in group]]
    )
    assert found == pytest.approx([whole[number] for number in episodes], rel=1e-12, abs=1e-12)


def test_a_tokens_return_is_what_comes_from_it_on_added_up_from_the_end():
    assert returns([0.0, 1.0, 0.0, -3.0]) == [-2.0, -2.0, -3.0, -3.0]
    rewards = [0.1] * 10
    assert returns(rewards)[0] == sum(rewards) != 1.0
    assert returns([]) == []


token_rewards = st.lists(st.lists(st.floats(-3, 3), max_size=4), max_size=6)


@given(token_rewards, st.data())
def test_whitening_has_the_same_bits_on_any_number_of_ranks(trajectories, data):
    each = [[(1, a) for a in returns(rewards)] for rewards in trajectories]
    cut = data.draw(st.integers(0, len(each)))

    def whitened(pairs, gather=alone):
        whiten = whitening(pairs, gather)
        return [[whiten(a) for _, a in each] for each in pairs]

    first, second = on_ranks([each[:cut], each[cut:]], whitened)
    assert first + second == whitened(each)


def reinforce_plus_plus(token_rewards, mask):
    """`compute_reinforce_plus_plus_outcome_advantage` of verl 0.9.1 with gamma 1: [B, T]."""
    found, running = torch.zeros_like(token_rewards), torch.zeros(len(token_rewards)).double()
    for t in reversed(range(token_rewards.shape[1])):
        new = token_rewards[:, t] + running
        found[:, t] = new * mask[:, t]
        running = new * mask[:, t] + running * (1 - mask[:, t])
    return masked_whiten(found, mask)


@given(st.lists(st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=6), min_size=2))
def test_whitened_returns_are_verls_reinforce_plus_plus(trajectories):
    values = [returns(rewards) for rewards in trajectories]
    assume(len({a for each in values for a in each}) > 1)
    whiten = whitening([[(1, a) for a in each] for each in values])
    # Every second token was given: verl carries the return over it.
    width = 2 * max(map(len, trajectories))
    rewards, mask = torch.zeros(2, len(values), width).double()
    for row, each in enumerate(trajectories):
        rewards[row, : 2 * len(each) : 2] = torch.tensor(each).double()
        mask[row, : 2 * len(each) : 2] = 1
    expected = reinforce_plus_plus(rewards, mask)[mask.bool()].tolist()
    found = [whiten(a) for each in values for a in each]
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
