"""Which samples are trained on, and in which groups."""

import pytest

from onpolicy.config import TrainConfig
from onpolicy.config.groups import AlgorithmConfig
from onpolicy.errors import ConfigError
from onpolicy.run.train_samples import has_signal, make_train_samples, worth_training
from onpolicy.trajectory import Span
from onpolicy.types import Prompt, Sample, SampleGroup
from tests.support.samples import answered, make_completion


def group(index, rewards, episodes=None):
    prompt = Prompt(index=index, prompt_ids=[3], label="", text="")
    samples = [
        Sample(
            prompt=prompt,
            sample_index=i,
            trajectory=answered(prompt, make_completion([5], [-1.0])),
            reward=reward,
        )
        for i, reward in zip(episodes or range(len(rewards)), rewards, strict=True)
    ]
    return SampleGroup(prompt=prompt, samples=samples)


def config(**algorithm):
    return TrainConfig(algorithm=AlgorithmConfig(**algorithm))


GROUPS = [group(0, [1.0, 1.0]), group(1, [0.0, 2.0]), group(2, [0.0, 0.0])]


@pytest.mark.parametrize(("filters", "kept"), [(False, [0, 1, 2]), (True, [1])])
def test_groups_of_equal_rewards_are_left_out_only_if_that_is_asked_for(filters, kept):
    found = worth_training(GROUPS, config(filter_equal_rewards=filters))
    assert [g.prompt.index for g in found] == kept


@pytest.mark.parametrize(
    ("term", "algorithm"),
    [
        ("objective", {}), ("kl_loss", {"use_kl_loss": True}), ("entropy", {"entropy_coef": 0.1}),
        ("opd_kl", None),
    ],
)  # fmt: skip
def test_weights_of_a_term_that_the_loss_does_not_have_end_the_run(term, algorithm):
    drawn = group(0, [1.0, 0.0])
    drawn.samples[1].token_weights = {"objective": [1.0], term: [0.5]}
    if algorithm is not None:
        assert worth_training([drawn], config(**algorithm)) == [drawn]
    if algorithm != {}:
        refusal = rf"^prompt 0, sample 1: token_weights\['{term}'\]: the loss .* or give .*-"
        with pytest.raises(ConfigError, match=refusal):
            worth_training([drawn], config())


def test_samples_keep_their_order_and_their_groups():
    made = make_train_samples(GROUPS)
    assert [(m.name, m.group) for m in made] == [
        ("prompt 0, sample 0", 0), ("prompt 0, sample 1", 0), ("prompt 1, sample 0", 1),
        ("prompt 1, sample 1", 1), ("prompt 2, sample 0", 2), ("prompt 2, sample 1", 2),
    ]  # fmt: skip
    assert made[3] is GROUPS[1].samples[1]


def test_an_episode_has_a_number_of_its_own_in_the_rollout_and_may_have_failed_beside_others():
    groups = [group(0, [1.0, 1.0, 0.0], [1, 1, 3]), group(1, []), group(2, [0.5, 0.5], [0, 2])]
    made = make_train_samples(worth_training(groups, config()))
    assert [(m.sample_index, m.group, m.episode) for m in made] == [
        (1, 0, 0), (1, 0, 0), (3, 0, 1), (0, 1, 2), (2, 1, 3),
    ]  # fmt: skip
    assert [m.prompt.index for m in made] == [0, 0, 0, 2, 2]


@pytest.mark.parametrize(
    ("rewards", "episodes", "differ"),
    [
        ([0.0, 1.0, 0.5], [0, 0, 1], False),  # its trajectories differ, and the episodes do not
        ([0.1, 0.1, 0.1, 0.1], [0, 0, 0, 1], False),  # the mean of three 0.1 is 0.1
        ([0.0, 1.0, 0.0], [0, 0, 1], True),
        ([1.0], [2], False),
        ([], [], False),
    ],
)
def test_a_group_has_a_signal_if_its_episodes_differ(rewards, episodes, differ):
    drawn = group(0, rewards, episodes)
    assert has_signal(drawn) == differ
    kept = worth_training([drawn], config(filter_equal_rewards=True))
    assert [*kept] == [drawn] * differ


def test_a_token_lags_by_the_pushes_between_its_weights_and_those_that_learn():
    spans = (Span(version=3, start=0, end=2), Span(version=5, start=2, end=3))
    prompt = Prompt(index=0, prompt_ids=[3], label="", text="")
    completion = make_completion([5, 6, 7], [-1.0] * 3, spans=spans)
    group = SampleGroup(
        prompt=prompt,
        samples=[Sample(prompt=prompt, sample_index=0, trajectory=answered(prompt, completion))],
    )
    (made,) = make_train_samples([group], 5)
    assert made.lags == [2, 2, 0]
    (made,) = make_train_samples([group])
    assert made.lags == [0, 0, 0]
