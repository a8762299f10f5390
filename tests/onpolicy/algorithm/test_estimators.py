import pytest
from hypothesis import given
from hypothesis import strategies as st

from fallback_correction.tokens import alone
from onpolicy.algorithm.estimators import group_advantages, returns, whitening
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


def test_reinforce_plus_plus_baseline_centres_each_group_and_whitens_over_tokens():
    # Centred: -2, 2 | 2, -2 of 1, 3 | 2, 2 tokens. Mean 0.5, squares 6.25 + 6.75 + 4.5 + 12.5 = 30.
    scale = (30 / 7 + 1e-8) ** 0.5
    found = group_advantages(
        [[2.0, 6.0], [4.0, 0.0]], "reinforce_plus_plus_baseline", [[1, 3], [2, 2]]
    )
    expected = [[-2.5 / scale, 1.5 / scale], [1.5 / scale, -2.5 / scale]]
    assert found == [pytest.approx(group, rel=1e-14) for group in expected]


samples = st.tuples(st.integers(-5, 5).map(float), st.integers(1, 40))


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
